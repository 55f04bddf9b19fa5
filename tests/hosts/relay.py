"""A TCP relay in front of a server: what passes through it can be delayed, or stop in one direction, for one peer.

    peer ──▶ relay ──▶ server        `there`: what the peer sends; `back`: what it is sent

- Unlike a cut of the network, connections stay: both sides see their bytes acknowledged, and no answer comes.
- A peer is known by its address, so one relay serves all hosts. It runs in a thread, on the host that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.deadlines import HANG_S
from tests.hosts.network import Direction

_CHUNK = 1 << 16
_QUEUED = 64  # chunks on their way; more is the sender's to wait with


@dataclass
class _Way:
    """How one peer's bytes pass; `open` is None while all of them do."""

    delay_s: dict[str, float] = field(default_factory=lambda: {"there": 0.0, "back": 0.0})
    open: dict[str, asyncio.Event | None] = field(default_factory=lambda: {"there": None, "back": None})


class Relay:
    """`close` ends it and all connections."""

    def __init__(self, address: str, port: int, server: tuple[str, int]) -> None:
        self._listen, self._server, self._ways = (address, port), server, dict[str, _Way]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._is_up, self._error = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()
        assert self._is_up.wait(HANG_S), "the relay did not start"
        assert not self._error, self._error

    def delay(self, peer: str, seconds: float) -> Callable[[], None]:
        """Every chunk takes so much longer, in both directions; returns what ends that."""

        def settle(now_s: float) -> None:
            self._ways.setdefault(peer, _Way()).delay_s = {"there": now_s, "back": now_s}

        self._do(lambda: settle(seconds))
        return lambda: self._do(lambda: settle(0.0))

    def stall(self, peer: str, direction: Direction) -> Callable[[], None]:
        """Nothing passes in this direction until what this returns is called; then everything does."""
        names = ("there", "back") if direction == "both" else (direction,)

        def close() -> None:
            way = self._ways.setdefault(peer, _Way())
            for name in names:
                way.open[name] = way.open[name] or asyncio.Event()

        def again() -> None:
            way = self._ways[peer]
            for name in names:
                if (event := way.open[name]) is not None:
                    event.set()
                    way.open[name] = None

        self._do(close)
        return lambda: self._do(again)

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(HANG_S)

    def _do(self, act: Callable[[], None]) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(act)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(asyncio.start_server(self._serve, *self._listen))
        except BaseException as error:
            self._error.append(error)
            raise
        finally:
            self._is_up.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[0]
        way = self._ways.setdefault(peer, _Way())
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._server)
        except OSError:  # the server is down: the peer learns it as it would without a relay
            writer.transport.abort()
            return
        passing = [self._pass(reader, far_writer, way, "there"), self._pass(far_reader, writer, way, "back")]
        tasks = [self._keep(each) for each in passing]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the relay is closed: asyncio's server takes no cancelled task
            return
        finally:
            for task in tasks:
                task.cancel()
            for each in (writer, far_writer):
                each.transport.abort()

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Way, name: str) -> None:
        """Chunks keep their distances: a delay is added to each one's own time of arrival."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED)
        read = self._keep(self._take(reader, queue, way, name))
        try:
            while True:
                due, chunk = await queue.get()
                if (late_s := due - self._loop.time()) > 0:
                    await asyncio.sleep(late_s)
                while (event := way.open[name]) is not None:
                    await event.wait()
                if not chunk:
                    return
                writer.write(chunk)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
        finally:
            read.cancel()

    async def _take(
        self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]], way: _Way, name: str
    ) -> None:
        chunk = b"-"
        while chunk:
            try:
                chunk = await reader.read(_CHUNK)
            except ConnectionError:
                chunk = b""
            await queue.put((self._loop.time() + way.delay_s[name], chunk))
