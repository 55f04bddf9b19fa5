"""An ASGI application on a real port of this host, for as long as a test needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from sluice.pipeline.http.server import Connection, serve
from tests.deadlines import HANG_S


@dataclass
class Served:
    """Where it listens, and how it is ended."""

    port: int
    task: asyncio.Task[None]
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        """The address of a path."""
        return f"http://{host}:{self.port}{path}"

    async def exchange(self, request: bytes) -> bytes:
        """Bytes as they are sent, and all that is answered until the connection is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        async with asyncio.timeout(HANG_S):
            writer.write(request)
            answer = await reader.read()
            writer.close()
            return answer


@contextlib.asynccontextmanager
async def served(
    app: ASGIApp, grace_s: float = 5.0, connection: type[Connection] = Connection
) -> AsyncIterator[Served]:
    """Serve the application until the block ends; what ended it early is raised here."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(
            app, host="127.0.0.1", port=0, stop=stop, grace_s=grace_s, on_ready=ready.set_result, connection=connection
        )
    )
    async with asyncio.timeout(HANG_S):
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await task
    try:
        yield Served(ready.result(), task, stop)
    finally:
        stop.set()
        await task
