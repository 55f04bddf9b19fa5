"""The process of the embedded broker: started, waited for while it loads its data, started again when it dies.

| waits for            | unblocked by                                      |
|----------------------|---------------------------------------------------|
| the server to answer | the server; at most `START_S`                     |
| the server to load   | the end of its append-only file; at most `LOAD_S` |

- It comes back on the same port, with the same password and data, so that whoever uses it just goes on.
- A restart that fails is tried again, less and less often, until the owner stops it.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Literal

import redis

from pipeline.child_process import tethered
from pipeline.errors import BrokerError
from pipeline.files import write_atomic
from pipeline.logs import get_logger

START_S = 15.0
LOAD_S = 900.0
_STOP_S = 15.0
_LOOK_S = 0.05
_PAUSE_MAX_S = 5.0


class EmbeddedServer:
    """One server process over one directory; `start`, then `watch`, then `stop`."""

    def __init__(self, command: list[str], url: str, directory: Path) -> None:
        self.url = url
        self._command, self._directory = command, directory
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="embedded-broker", daemon=True)

    def start(self) -> None:
        """Start it and return once it answers; raises BrokerError that shows its log."""
        with open(self._directory / "broker.log", "ab", opener=private) as log:
            process = subprocess.Popen(
                tethered(self._command), stdout=log, stderr=log, start_new_session=True, umask=0o077
            )
        self._process = process
        write_atomic(
            self._directory / "broker.json", json.dumps({"url": self.url, "pid": process.pid}), mode=0o600
        )  # before it is ready: who joins then sees it load
        try:
            self._wait_ready(process)
        except BrokerError:
            _end(process)
            raise

    def watch(self) -> None:
        """From now on, start it again whenever it dies."""
        self._watcher.start()

    def stop(self) -> None:
        """End it for good."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._process:
            _end(self._process)

    def _watch(self) -> None:
        failures = 0
        while not self._stopping.wait(_LOOK_S):
            if self._process is None or self._process.poll() is None:
                continue
            get_logger().warning("the embedded broker died; starting it again", code=self._process.returncode)
            try:
                self.start()
                failures = 0
                get_logger().warning("the embedded broker is back")
            except (BrokerError, OSError) as error:
                failures += 1
                get_logger().error("the embedded broker does not come back", failures=failures, error=str(error))
                self._stopping.wait(min(0.1 * 2**failures, _PAUSE_MAX_S))

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        started, loading = time.monotonic(), False
        with redis.Redis.from_url(self.url, socket_timeout=2) as client:  # type: ignore[no-untyped-call]
            while process.poll() is None and not self._stopping.is_set():
                state = probe(client)
                if state == "ready":
                    return
                if state == "loading" and not loading:
                    loading = True
                    get_logger().warning("the embedded broker loads its data", at_most_s=LOAD_S)
                if time.monotonic() - started > (LOAD_S if loading else START_S):
                    break
                time.sleep(0.02)
        if self._stopping.is_set():
            return
        raise BrokerError(self._why(process, loading=loading))

    def _why(self, process: subprocess.Popen[bytes], *, loading: bool) -> str:
        log = self._directory / "broker.log"
        if process.poll() is None and loading:
            cause = f"was still loading its data after {LOAD_S:.0f} s; is the disk slow?"
        elif process.poll() is None:
            cause = f"did not answer within {START_S:.0f} s"
        else:
            cause = "did not start"
        return f"the embedded broker {cause}; the end of {log}:\n{log.read_text(errors='replace')[-800:]}"


def private(path: str, flags: int) -> int:
    """An opener of files that are their owner's alone, also where they were made before."""
    handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)
    return handle


def probe(client: redis.Redis) -> Literal["ready", "loading", "silent"]:
    """What a server does now."""
    try:
        client.ping()  # type: ignore[no-untyped-call]
    except redis.BusyLoadingError:
        return "loading"
    except redis.RedisError:
        return "silent"
    return "ready"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
