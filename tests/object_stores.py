"""An S3 server on loopback (moto's, an emulator), and a relay in front of it that cuts connections or keeps silent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.server import ThreadedMotoServer

from tests.deadlines import HANG_S

BUCKET = "sluice"


@contextmanager
def s3_server(port: int = 0) -> Iterator[str]:
    """Its address. What is stored outlives it, as long as this process."""
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def use(patch: pytest.MonkeyPatch, address: str) -> None:
    """The environment of a process that may use it, as a user would set it."""
    for name, value in environment(address).items():
        patch.setenv(name, value)


def environment(address: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "AKIDLOOPBACK",
        "AWS_SECRET_ACCESS_KEY": "loopback-secret-key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "NO_PROXY": "127.0.0.1",
    }


class Relay:
    """Forwards bytes; while `budget` isn't None it counts down, and at 0 every connection is cut."""

    def __init__(self, port: int) -> None:
        self._far, self._port, self.cuts = port, 0, 0
        self.silent = 0  # so many of the next connections are accepted, and nothing passes through them
        self.budget: int | None = None  # bytes
        self.rate: float | None = None  # bytes/s of each direction, together over all connections
        self._due = [0.0, 0.0]
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(HANG_S)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_S)

    def _run(self, started: threading.Event) -> None:
        async def start() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self._port = server.sockets[0].getsockname()[1]
            started.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.silent:
            self.silent -= 1
            while await reader.read(1 << 16):
                pass
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._far)
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(self._pump(reader, far_writer, 0), self._pump(far_reader, writer, 1))
        finally:
            self._writers -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        with contextlib.suppress(ConnectionError):
            while block := await reader.read(1 << 16):
                if self.rate is not None:
                    now = self._loop.time()
                    self._due[way] = max(now, self._due[way]) + len(block) / self.rate
                    await asyncio.sleep(self._due[way] - now)
                if self.budget is not None:
                    self.budget -= len(block)
                    if self.budget <= 0:
                        self.cuts, self.budget = self.cuts + 1, None
                        for each in self._writers:
                            each.transport.abort()
                        return
                writer.write(block)
                await writer.drain()
        writer.close()
