"""Who may ask and how much, over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel

from sluice.pipeline.http.middleware import BearerAuth, BodyLimit
from tests.deadlines import HANG_S
from tests.served import Served, served

KEY = "k3y-ü"


class Body(BaseModel):
    text: str


def application(key: str | None = KEY, max_bytes: int = 1000) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "healthy"

    @app.post("/parsed")
    async def parsed(body: Body) -> int:
        return len(body.text)

    @app.post("/raw")
    async def raw(request: Request) -> int:
        return len(await request.body())

    @app.post("/unread")
    async def unread() -> str:
        return "unread"

    app.add_middleware(BodyLimit, max_bytes=max_bytes)
    app.add_middleware(BearerAuth, key=key)
    return app


@pytest.fixture
async def closed() -> AsyncIterator[Served]:
    async with served(application()) as site:
        yield site


@pytest.fixture
async def site() -> AsyncIterator[Served]:
    async with served(application(key=None)) as site:
        yield site


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Basic k3y-ü", "k3y-ü", "Bearer k3y", "Bearer k3y-üü", "Bearer k3y-ü extra"],
)
@pytest.mark.parametrize("path", ["/raw", "/no/such/path", "/health/", "/healthy"])
async def test_without_the_key_nothing_is_answered(closed: Served, header: str | None, path: str) -> None:
    line = b"" if header is None else b"Authorization: " + header.encode() + b"\r\n"
    answer = await closed.exchange(b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"www-authenticate: bearer" in head.lower()
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert b"k3y" not in answer


async def test_two_keys_are_none(closed: Served) -> None:
    line = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
    answer = await closed.exchange(b"POST /raw HTTP/1.1\r\nHost: x\r\n" + line * 2 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("others", [[b"X-Api-Key: "], [b"X-Api-Key: ", b"Authorization: Bearer x"]])
async def test_a_wrong_or_second_key_opens_nothing(closed: Served, others: list[bytes]) -> None:
    right = b"X-Api-Key: " + KEY.encode() + b"\r\n"
    line = right + b"\r\n".join(others) + b"\r\n"
    answer = await closed.exchange(b"POST /raw HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")
    answer = await closed.exchange(b"POST /raw HTTP/1.1\r\nHost: x\r\nX-Api-Key: wrong\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("header", [b"Authorization: Bearer ", b"Authorization: bearer ", b"X-Api-Key: "])
async def test_with_the_key_it_is_answered(closed: Served, header: bytes) -> None:
    line = header + KEY.encode() + b"\r\nConnection: close\r\n"
    answer = await closed.exchange(b"POST /unread HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n")
    assert answer.endswith(b'"unread"')


async def test_health_is_open(closed: Served) -> None:
    async with aiohttp.ClientSession() as session, session.get(closed.url("/health")) as answer:
        assert await answer.json() == "healthy"


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n" + b"200\r\n" + b"x" * 512 + b"\r\n"


@pytest.mark.parametrize("path", [b"/raw", b"/parsed"])
@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 1001\r\n\r\n",
        b"Content-Length: 9999999999999999999\r\n\r\n",
        b"Content-Length: 2000\r\n\r\n" + b"x" * 2000,
        CHUNKED + b"200\r\n" + b"x" * 512 + b"\r\n",  # and more would come
        CHUNKED + b"200\r\n" + b"x" * 512 + b"\r\n0\r\n\r\n",
    ],
)
async def test_too_much_is_413(site: Served, path: bytes, rest: bytes) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    async with asyncio.timeout(HANG_S):
        writer.write(head + rest)
        answer = await reader.readuntil(b"}}")
    writer.close()  # what does not come is waited for a while
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("num_bytes", [0, 999, 1000])
async def test_what_fits_is_taken(site: Served, num_bytes: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, num_bytes, 100):
            yield b"x" * min(100, num_bytes - at)

    async with aiohttp.ClientSession() as session:
        for body in (b"x" * num_bytes, chunks()):
            async with session.post(site.url("/raw"), data=body) as answer:
                assert await answer.json() == num_bytes


async def test_control_characters_in_a_header_are_refused(site: Served) -> None:
    answer = await site.exchange(b"POST /unread HTTP/1.1\r\nHost: x\r\nX-Name: a\x1b[31mb\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
