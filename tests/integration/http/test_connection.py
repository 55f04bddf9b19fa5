"""Bytes as no client of ours would send them: what is refused, and how soon it ends."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from functools import partial

import pytest
from fastapi import FastAPI, Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sluice.pipeline.http.server import RESERVED, Connection
from tests.clock import LIMIT_S, skip
from tests.deadlines import HANG_S
from tests.roles import eventually
from tests.served import Served, served

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"


class Hasty(Connection):
    """The same in a tenth of a second. Only for callers who end the same way whenever they are late."""

    head_s, body_silent_s, body_s, write_s = 0.1, 0.1, 0.3, 0.1


class Patient(Connection):
    """Its limits are only reached where a test sets the clock forward."""

    head_s = body_silent_s = body_s = write_s = LIMIT_S


def application() -> FastAPI:
    app = FastAPI()
    app.state.posts = 0  # that it has begun

    @app.get("/")
    async def get() -> str:
        return "here"

    @app.post("/")
    async def post(request: Request) -> int:
        app.state.posts += 1
        return len(await request.body())

    @app.get("/health")
    @app.get("/metrics")
    async def health() -> str:
        return "well"

    @app.get("/large")
    async def large() -> str:
        return "x" * 30_000_000

    @app.get("/headers")
    async def headers(request: Request) -> list[str]:
        return sorted(request.headers)

    return app


def test_uvicorn_still_has_what_is_extended() -> None:
    """Were one of these renamed or no longer called, a deadline would silently be none."""
    source = inspect.getsource(HttpToolsProtocol)
    called = ("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing")
    parsed = ("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete")
    for name in (*called, *parsed, "on_response_complete", "send_400_response", "_unset_keepalive_if_required"):
        assert inspect.isfunction(getattr(HttpToolsProtocol, name)), name
    for name in ("connections", "cycle", "flow", "headers", "url", "loop", "parser"):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name
    for name in (
        "on_response=self.on_response_complete",
        "self.send_400_response(",
        "httptools.HttpRequestParser(self)",
    ):
        assert name in source, name


async def status(site: Served, request: bytes) -> int:
    """Of the one answer, after which the connection is closed."""
    answer = await site.exchange(request)
    assert answer.count(b"HTTP/1.1") == 1, answer
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (POST + b"Content-Length: +1\r\n\r\na", 400),
        (POST + b"Transfer-Encoding: chunked, x\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: x\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n", 400),
        (GET.replace(b"\r\n", b"\n") + b"\n", 400),
        (b"GET / HTTP/1.1\nHost: x\r\n\r\n", 400),
        (GET + b"A: b\nC: d\r\n\r\n", 400),
        (GET + b"A : b\r\n\r\n", 400),
        (GET + b"A: b\r\n c\r\n\r\n", 400),
        (GET + b"A: b\x1bc\r\n\r\n", 400),
        (GET + b"A: b\x00c\r\n\r\n", 400),
        (GET + b"A: b\x7fc\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (GET + b"Host: y\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"nonsense\r\n\r\n", 400),
        (POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 9\r\n\r\nGET / HTT", 400),
        (POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (GET + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n", 200),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (GET + b"A: " + b"b" * 70_000 + b"\r\n\r\n", 431),
        (GET + b"A: " + b"b" * 70_000, 431),
        (GET + b"A: b\r\n" * 20_000 + b"\r\n", 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (GET + b"A: " + b"b" * 60_000 + b"\r\nConnection: close\r\n\r\n", 200),
        (POST + b"Content-Length: 100000\r\nConnection: close\r\n\r\n" + b"x" * 100_000, 200),
    ],
    ids=lambda value: repr(value[15:60]) if isinstance(value, bytes) else str(value),
)
async def test_what_two_servers_may_read_in_two_ways_is_refused(request_: bytes, expected: int) -> None:
    async with served(application()) as site:
        assert await status(site, request_) == expected
        assert await status(site, GET + b"Connection: close\r\n\r\n") == 200


async def test_a_trailer_is_no_header() -> None:
    async with served(application()) as site:
        head = b"GET /headers HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await site.exchange(head + b"0\r\nAuthorization: Bearer key\r\n\r\n")
        assert b'["connection","host","transfer-encoding"]' in answer


async def begun(site: Served, first: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose first bytes were sent before the server knows of it: they can't be late."""
    connected = socket.create_connection(("127.0.0.1", site.port))
    connected.sendall(first)
    return await asyncio.open_connection(sock=connected)


async def until(holds: Callable[[], bool], cause: str) -> None:
    async def look() -> bool:
        return holds()

    await eventually(look, cause)


def slow(whole: bytes, piece: int = 1) -> Iterator[bytes]:
    yield from (whole[at : at + piece] for at in range(0, len(whole), piece))


@pytest.mark.parametrize(
    ("pieces", "pause_s", "expected"),
    [
        ([], 0, b""),
        ([b"\r\n"], 0, b""),
        ([b"G"], 0, b"HTTP/1.1 408 "),
        (slow(GET * 9), 0.01, b"HTTP/1.1 408 "),
        (itertools.repeat(b"\r\n", 60), 0.01, b""),
        ([POST + b"Content-Length: 9\r\n\r\n"], 0, b"HTTP/1.1 408 "),
        ([POST + b"Content-Length: 9\r\n\r\n", *slow(b"12345678")], 0.04, b"HTTP/1.1 408 "),
        ([POST + b"Content-Length: 999\r\n\r\n", *slow(b"x" * 60)], 0.02, b"HTTP/1.1 408 "),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n", *(b"1\r\na\r\n",) * 60], 0.02, b"HTTP/1.1 408 "),
        ([GET + b"\r\n" + GET], 0, b"HTTP/1.1 200 "),
    ],
    ids=["silent", "blank", "a byte", "slow head", "slow blanks", "no body", "slow", "long", "chunks", "half a second"],
)
async def test_who_does_not_go_on_is_cut_off(pieces: Iterable[bytes], pause_s: float, expected: bytes) -> None:
    async with served(application(), connection=Hasty) as site, asyncio.timeout(HANG_S):
        left = iter(pieces)
        reader, writer = await begun(site, next(left, b""))

        async def send() -> None:
            for piece in left:
                await asyncio.sleep(pause_s)
                writer.write(piece)

        sending, answer = asyncio.create_task(send()), b""
        with contextlib.suppress(ConnectionResetError):  # what is sent after the end is answered so
            while piece := await reader.read(1 << 16):
                answer += piece
        sending.cancel()
        writer.close()
        assert answer.startswith(expected)
        assert bool(answer) == bool(expected)


async def test_who_does_not_read_is_cut_off() -> None:
    lost = asyncio.Event()

    class Told(Hasty):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    async with served(application(), connection=Told) as site, asyncio.timeout(HANG_S):
        reader, writer = await begun(site, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await lost.wait()
        assert len(await reader.read()) < 30_000_000
        writer.close()


async def test_who_reads_slowly_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(application(), connection=Patient) as site, asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        size = reads = 0
        while piece := await reader.read(1 << 19):
            size, reads = size + len(piece), reads + 1
            if reads <= 40:
                skip(monkeypatch, LIMIT_S / 20)  # twice the limit in all
                await asyncio.sleep(0.01)
        assert size > 30_000_000
        assert reads > 40
        writer.close()


async def test_a_body_that_the_application_does_not_read_is_nobodys_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    read = asyncio.Event()
    made: list[Connection] = []

    class Kept(Patient):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            made.append(self)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await read.wait()
        await inner(scope, receive, send)

    inner = application()
    async with served(app, connection=Kept) as site, asyncio.timeout(HANG_S):
        size = 3_000_000
        head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % size
        asked = asyncio.create_task(site.exchange(head + b"x" * size))
        await until(lambda: bool(made) and made[0].flow.read_paused, "more of the body than is taken unread")
        for _ in range(2):
            skip(monkeypatch)
            await asyncio.sleep(0.05)  # what is late is cut off
        read.set()
        assert (await asked).endswith(b"3000000")


class Two(Patient):
    max_connections = 2


async def test_at_the_limit_the_oldest_silent_one_makes_room() -> None:
    class Few(Patient):
        max_connections = 3

    async with served(application(), connection=Few) as site, asyncio.timeout(HANG_S):
        silent = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(3)]
        for _ in range(5):
            assert await status(site, GET + b"Connection: close\r\n\r\n") == 200
        assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()


async def test_at_the_limit_of_busy_ones_the_next_is_told() -> None:
    app = application()
    async with served(app, connection=Two) as site, asyncio.timeout(HANG_S):
        busy = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(2)]
        for _, writer in busy:
            writer.write(POST + b"Content-Length: 9\r\n\r\n")
        await until(lambda: app.state.posts == 2, "both to be busy")
        assert await status(site, GET + b"\r\n") == 503
        for reader, writer in busy:
            writer.write(b"123456789")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()


async def occupied(site: Served, app: FastAPI, count: int, scope: AsyncExitStack) -> None:
    """So many connections whose body is under way: none of them is silent. Those beyond two are told that it's full."""
    for at in range(1, count + 1):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        scope.callback(writer.close)
        writer.write(POST + b"Content-Length: 9\r\n\r\n")
        if at <= Two.max_connections:
            await until(partial(_has_begun, app, at), f"{at} to be busy")
        else:
            assert b" 503 " in await reader.readline()


def _has_begun(app: FastAPI, count: int) -> bool:
    return app.state.posts == count


@pytest.mark.parametrize("path", [b"/health", b"/metrics", b"/metrics?name=a"])
async def test_at_the_limit_health_and_metrics_are_answered(path: bytes) -> None:
    app = application()
    async with served(app, connection=Two) as site, asyncio.timeout(HANG_S), AsyncExitStack() as scope:
        await occupied(site, app, 2, scope)
        for _ in range(3 * RESERVED):
            assert await status(site, GET.replace(b"/ ", path + b" ") + b"Connection: close\r\n\r\n") == 200
        assert await status(site, GET.replace(b"/ ", b"/healthy ") + b"\r\n") == 503
        assert await status(site, POST.replace(b"/ ", path + b" ") + b"Content-Length: 1\r\n\r\na") == 503
        assert await status(site, GET.replace(b"/ ", path + b" ") + b"Content-Length: 1\r\n\r\na") == 503
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        scope.callback(writer.close)
        writer.write(GET.replace(b"/ ", path + b" ") + b"\r\n")
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b'"well"')
        writer.write(GET + b"\r\n")  # the same connection may not ask anything else now
        assert b" 503 " in await reader.readline()


async def test_nobody_holds_the_places_that_are_kept_for_health() -> None:
    """Neither the silent, nor those that begin what they may not ask."""
    app = application()
    async with served(app, connection=Two) as site, asyncio.timeout(HANG_S), AsyncExitStack() as scope:
        await occupied(site, app, 2 + 2 * RESERVED, scope)
        for _ in range(2 * RESERVED):
            _, writer = await asyncio.open_connection("127.0.0.1", site.port)
            scope.callback(writer.close)
            writer.write(GET)  # and no end of the headers
        assert await status(site, GET.replace(b"/ ", b"/health ") + b"Connection: close\r\n\r\n") == 200


async def test_hundreds_of_silent_ones_are_gone_and_others_are_answered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(application(), connection=Patient) as site, asyncio.timeout(HANG_S):
        silent = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(300)]
        assert await status(site, GET + b"Connection: close\r\n\r\n") == 200
        skip(monkeypatch)
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()
