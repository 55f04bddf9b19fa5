"""A broker that is killed, and that hangs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from tests.killable_broker import KillableBroker

_READY_S = 30.0


class BatteredBroker(KillableBroker):
    """`appendfsync everysec` is the server's default; snapshots by RDB are off."""

    def __init__(self, directory: Path, **where: Any) -> None:
        super().__init__(directory, **where)
        self._options += ["--save", ""]

    def start(self) -> None:
        """On its own data; returns when it answers."""
        super().start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until it answers; fails at the deadline."""
        until = time.monotonic() + _READY_S
        while not self._answers():
            assert time.monotonic() < until, f"the broker did not answer within {_READY_S:.0f} s"
            time.sleep(0.02)

    def stall(self) -> None:
        """SIGSTOP: it takes connections and answers nothing."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def restart(self) -> None:
        """In order, with all its data."""
        assert self._process
        self._process.terminate()
        self._process.wait(_READY_S)
        self.start()

    def used_memory(self) -> int:
        """Bytes."""
        return self._ask(lambda client: client.info("memory")["used_memory"])

    def _answers(self) -> bool:
        try:
            return self._ask(lambda client: client.ping())
        except redis.RedisError:
            return False

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        with redis.Redis.from_url(self.url, socket_timeout=2) as client:
            return question(client)
