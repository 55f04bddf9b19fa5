"""Answers to requests whose body nobody reads to its end.

- A connection that is closed while bytes wait in it is reset, and its caller may lose the answer. So the answer is sent
  whole, and what still comes is thrown away: not for long, and not without end.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import Response

from pipeline.http.asgi import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 1 << 20
MOST_S, SILENT_S = 20.0, 2.0


def with_unread_body(response: Response, max_bytes: int = MOST_BYTES) -> ASGIApp:
    """The response as an application that reads up to `max_bytes` more before it ends."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def held_open(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await response(scope, receive, held_open)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOST_S):
                await _throw_away(receive, max_bytes)
        await send({"type": "http.response.body", "body": b""})

    return answer


async def _throw_away(receive: Receive, max_bytes: int) -> None:
    """Until the body ends, its limit, or a silence."""
    num_bytes = 0
    while num_bytes <= max_bytes:
        async with asyncio.timeout(SILENT_S):
            message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return
