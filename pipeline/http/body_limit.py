"""How large a request may be.

- Bytes are counted as they come; a Content-Length is only a reason to stop sooner.
- Whatever the application makes of the cut body, the caller is told 413, unless an answer had begun.
- A caller that is still sending can read its refusal: as much again as it may send is thrown away (unread.py).
"""

from __future__ import annotations

from fastapi import HTTPException

from pipeline.http.asgi import ASGIApp, Message, Receive, Scope, Send
from pipeline.http.errors import problem_response
from pipeline.http.unread import MOST_BYTES, with_unread_body

_CLOSE = {"Connection": "close"}  # the rest of the body is no next request


class BodyLimit:
    """ASGI middleware: 413 beyond `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _declared(scope) > self._max_bytes:
            await self._refusal(2 * self._max_bytes)(scope, receive, send)
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes, started, with_rest = 0, False, True

        async def count() -> Message:
            nonlocal num_bytes, with_rest
            message = await receive()
            num_bytes += len(message.get("body", b""))
            with_rest = message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise HTTPException(413, "the request is too large")
            return message

        async def answer(message: Message) -> None:
            nonlocal started
            if num_bytes > self._max_bytes and not started:
                return  # what the application says of a cut body
            started = True
            await send(message)

        try:
            await self._app(scope, count, answer)
        except HTTPException:
            if num_bytes <= self._max_bytes or started:
                raise
        if num_bytes > self._max_bytes and not started:
            await self._refusal(self._max_bytes if with_rest else 0)(scope, receive, send)

    def _refusal(self, unread: int) -> ASGIApp:
        """`unread`: bytes that may still come."""
        message = f"the request is larger than {self._max_bytes} bytes; send less, or raise max_body_mb"
        response = problem_response(413, message, headers=_CLOSE)
        return with_unread_body(response, max(unread, MOST_BYTES)) if unread else response


def _declared(scope: Scope) -> int:
    """Bytes; 0 where nothing readable is declared."""
    lengths = [value for name, value in scope["headers"] if name.lower() == b"content-length" and value.isdigit()]
    return max((int(value[:20]) for value in lengths), default=0)
