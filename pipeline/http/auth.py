"""The inbound bearer key.

- Optional: without a key everybody may ask. With one, no byte of the body is used before it is checked.
- Compared in constant time; never logged and never part of an answer.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from fastapi import HTTPException
from fastapi.requests import HTTPConnection

from pipeline.http.asgi import ASGIApp, Receive, Scope, Send
from pipeline.http.errors import problem_response
from pipeline.http.unread import with_unread_body

OPEN_PATHS = ("/health",)
"""Answered to everybody: what starts a container asks here."""

_ASK = {"WWW-Authenticate": "Bearer"}
_MESSAGE = "the key is missing or wrong; send it as 'Authorization: Bearer KEY'"


class BearerAuth:
    """ASGI middleware: 401 unless the request has the key."""

    def __init__(self, app: ASGIApp, key: str | None, open_paths: Sequence[str] = OPEN_PATHS) -> None:
        self._app = app
        self._key = key
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or _holds(scope, self._key):
            await self._app(scope, receive, send)
        else:
            refusal = problem_response(401, _MESSAGE, headers={**_ASK, "Connection": "close"})
            await with_unread_body(refusal)(scope, receive, send)


def require_bearer(key: str | None) -> Callable[[HTTPConnection], None]:
    """The same check as a FastAPI dependency, for one route. FastAPI reads the body before it."""

    def check(connection: HTTPConnection) -> None:
        if not _holds(connection.scope, key):
            raise HTTPException(401, _MESSAGE, _ASK)

    return check


def _holds(scope: Scope, key: str | None) -> bool:
    if key is None:
        return True
    given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, token = given[0].partition(b" ")
    return hmac.compare_digest(token.strip(), key.encode()) and scheme.lower() == b"bearer"
