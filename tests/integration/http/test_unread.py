"""Refusals of requests whose body is still coming: whoever sends all of it before it reads has the answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import FastAPI, Request

from sluice.pipeline.http.middleware import BearerAuth, BodyLimit
from tests.deadlines import HANG_S
from tests.served import served

LIMIT = 600_000
PIECE = b"x" * 10_000
SENT = 100  # pieces, more than is read at a time


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/raw")
    async def raw(request: Request) -> int:
        return len(await request.body())

    app.add_middleware(BodyLimit, max_bytes=LIMIT)
    app.add_middleware(BearerAuth, key="key")
    return app


BODIES = {
    "whole": b"Content-Length: %d\r\n\r\n" % (SENT * len(PIECE)) + PIECE * SENT,
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n" + (b"%x\r\n%b\r\n" % (len(PIECE), PIECE)) * SENT + b"0\r\n\r\n",
}
KEY = b"Authorization: Bearer key\r\n"


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("status", "headers"), [(413, KEY), (401, b""), (400, KEY + b"X-Name: a\x1bb\r\n")])
async def test_the_refusal_is_read_to_its_end_and_the_connection_is_not_reset(
    body: str, status: int, headers: bytes
) -> None:
    async with served(application()) as site:
        answer = await site.exchange(b"POST /raw HTTP/1.1\r\nHost: x\r\n" + headers + BODIES[body])
    head, _, said = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(said)["error"]["message"]


async def test_a_body_without_an_end_is_not_read_for_ever() -> None:
    async with served(application()) as site, asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(b"POST /raw HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 401 Unauthorized\r\n"
        with pytest.raises(ConnectionError):
            await _flood(writer)
        writer.close()


async def _flood(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
        await writer.drain()


async def test_a_body_that_never_comes_is_not_waited_for_long() -> None:
    async with served(application()) as site:
        answer = await site.exchange(b"POST /raw HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")
