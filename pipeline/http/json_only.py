"""POSTs carry JSON and say so.

A browser sends forms and plain text to any host without asking it first; `application/json` it asks for.
"""

from __future__ import annotations

from pipeline.http.asgi import ASGIApp, Receive, Scope, Send
from pipeline.http.errors import problem_response
from pipeline.http.unread import with_unread_body

_JSON = b"application/json"


class JsonOnly:
    """ASGI middleware: 415 for a POST of another kind."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _is_json(scope):
            await self._app(scope, receive, send)
        else:
            says = "a POST has a JSON body here; send it with 'Content-Type: application/json'"
            refusal = problem_response(415, says, headers={"Connection": "close"})
            await with_unread_body(refusal)(scope, receive, send)


def _is_json(scope: Scope) -> bool:
    given = [value for name, value in scope["headers"] if name.lower() == b"content-type"]
    return len(given) == 1 and given[0].partition(b";")[0].strip().lower() == _JSON
