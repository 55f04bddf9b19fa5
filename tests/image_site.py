"""A real HTTP server on loopback, for images that are fetched."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Site:
    """Answers `routes[path]`; counts what it was asked."""

    def __init__(self) -> None:
        self.routes: dict[str, Handler | bytes] = {}
        self.asked: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.was_asked = asyncio.Event()
        self.port = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        """The address of a path."""
        return f"http://{host}:{self.port}{path}"

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked[request.path] += 1
        self.was_asked.set()
        self.headers.append(dict(request.headers))
        route = self.routes.get(request.path)
        if route is None:
            raise web.HTTPNotFound
        return web.Response(body=route) if isinstance(route, bytes) else await route(request)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """A running site."""
    site = Site()
    runner = web.ServerRunner(web.Server(site.answer), shutdown_timeout=0.1)
    await runner.setup()
    try:
        listener = web.TCPSite(runner, "127.0.0.1", 0)
        await listener.start()
        site.port = runner.addresses[0][1]
        yield site
    finally:
        await runner.cleanup()
