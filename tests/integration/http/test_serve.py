"""Applications on real ports: how serving starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import socket
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI

from sluice.pipeline.errors import ConfigError, SluiceError
from sluice.pipeline.http.server import bind, serve
from tests.deadlines import HANG_S
from tests.roles import eventually
from tests.served import served


def test_uvicorn_still_has_what_is_replaced() -> None:
    """`_Server` overrides these by name; were one renamed, signals would be uvicorn's again."""
    for name in ("capture_signals", "startup", "shutdown", "on_tick", "main_loop"):
        assert inspect.isfunction(getattr(uvicorn.Server, name))
    assert "with self.capture_signals()" in inspect.getsource(uvicorn.Server.serve)


def test_an_answer_waits_for_no_acknowledgement() -> None:
    """asyncio would set it, but not on the connections of a socket that was made like ours."""
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_requests_are_answered_and_signals_are_left_alone() -> None:
    app = FastAPI()

    @app.get("/")
    async def handlers() -> list[bool]:
        return [signal.getsignal(number) is before[number] for number in before]

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    async with served(app) as site, aiohttp.ClientSession() as session, session.get(site.url()) as answer:
        assert await answer.json() == [True, True]
        assert "server" not in answer.headers


class Slow:
    """Answers when it is let go; knows whether it was cancelled."""

    def __init__(self) -> None:
        self.app = FastAPI(lifespan=self._lifespan)
        self.app.get("/")(self._answer)
        self.asked, self.go, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.order: list[str] = []

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        self.order.append("application ended")

    async def _answer(self) -> str:
        self.asked.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.order.append("request ended")
        return "x" * 3_000_000


async def test_a_running_request_is_finished_and_no_new_one_is_taken() -> None:
    slow = Slow()
    async with served(slow.app, grace_s=60) as site, aiohttp.ClientSession() as session:
        asked = asyncio.create_task(_text(session, site.url()))
        await slow.asked.wait()
        site.stop.set()
        await eventually(partial(_is_closed, site.port), "the port to close")
        slow.go.set()
        assert len(await asked) > 3_000_000
        await site.task
    assert slow.order == ["request ended", "application ended"]


async def test_after_the_grace_it_is_cancelled() -> None:
    slow = Slow()
    async with served(slow.app, grace_s=0.05) as site, aiohttp.ClientSession() as session:
        asked = asyncio.create_task(_text(session, site.url()))
        await slow.asked.wait()
        site.stop.set()
        await site.task
        assert slow.cancelled.is_set()
        with pytest.raises(aiohttp.ClientError):
            await asked
    assert slow.order == ["request ended", "application ended"]


async def test_a_cancelled_server_leaves_nothing_running() -> None:
    slow = Slow()
    before = asyncio.all_tasks()
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(slow.app, host="127.0.0.1", port=0, stop=asyncio.Event(), grace_s=60, on_ready=ready.set_result)
    )
    port = await ready
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(_text(session, f"http://127.0.0.1:{port}/"))
        await slow.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(aiohttp.ClientError):
            await asked
    assert slow.order == ["request ended", "application ended"]
    assert not _connects(port)
    assert asyncio.all_tasks() == before


async def test_a_caller_that_does_not_read_does_not_hold_the_end() -> None:
    slow = Slow()
    slow.go.set()
    async with served(slow.app, grace_s=0.2) as site:
        _, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await slow.asked.wait()
        site.stop.set()
        async with asyncio.timeout(HANG_S):
            await site.task
        writer.close()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use; stop what listens there"):
            await serve(FastAPI(), host="127.0.0.1", port=port, stop=asyncio.Event(), grace_s=1)
        with pytest.raises(ConfigError, match=r"set another gateway\.port"):
            await serve(FastAPI(), host="127.0.0.1", port=port, stop=asyncio.Event(), grace_s=1, key="gateway.port")


@pytest.mark.parametrize(("host", "port"), [("203.0.113.1", 0), ("no such host", 0), ("127.0.0.1", 70_000)])
async def test_a_host_that_cannot_be_had_is_named(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}, port {port}"):
        await serve(FastAPI(), host=host, port=port, stop=asyncio.Event(), grace_s=1)


async def test_ipv6_is_served() -> None:
    ready = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(FastAPI(), host="::1", port=0, stop=stop, grace_s=1, on_ready=ready.set_result))
    port = await ready
    async with aiohttp.ClientSession() as session, session.get(f"http://[::1]:{port}/openapi.json") as answer:
        assert answer.status == 200
    stop.set()
    await task


async def test_an_application_that_does_not_start_is_an_error() -> None:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise ValueError("no broker")
        yield

    with pytest.raises(SluiceError, match="did not start; its error is in the log"):
        await serve(FastAPI(lifespan=lifespan), host="127.0.0.1", port=0, stop=asyncio.Event(), grace_s=1)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nBad: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad: a\rb\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused(request_: bytes) -> None:
    async with served(FastAPI()) as site:
        assert (await site.exchange(request_)).startswith(b"HTTP/1.1 400 ")


async def test_headers_without_an_end_are_not_collected() -> None:
    async with served(FastAPI()) as site:
        try:
            answer = await site.exchange(b"GET / HTTP/1.1\r\nHost: x\r\nLong: " + b"x" * 700_000)
        except ConnectionResetError:  # the server hung up with bytes still on their way
            return
        assert answer.startswith(b"HTTP/1.1 431 ")


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        answer.raise_for_status()
        return await answer.text()


async def _is_closed(port: int) -> bool:
    return not _connects(port)


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except OSError:
        return False
    return True
