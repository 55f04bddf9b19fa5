"""Who may see the dashboard, and the security headers of every response.

- With a key: HTTP Basic (any user name, the key as password) or a bearer token; compared in constant time.
- Without one, only this machine: the bound address is a loopback one (`check_host`), and so is the requested host
  name, or it is one of `dashboard.hosts` (pipeline/http/middleware.py).
- `/health` is open to everybody.
- `SafeHeaders`: nothing loads from elsewhere, nothing runs inline, and no other page may frame this one.
"""

from __future__ import annotations

import base64
import binascii
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.pipeline.config.types import DashboardConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.http.errors import problem_response
from sluice.pipeline.http.middleware import OPEN_PATHS, is_loopback, with_unread_body

KEY_NAME = "SLUICE_DASHBOARD_KEY"
_ASK = {"WWW-Authenticate": 'Basic realm="Sluice dashboard", charset="UTF-8"', "Connection": "close"}
_NO_KEY = "the key is missing or wrong; give it as the password (any user name), or as 'Authorization: Bearer KEY'"
POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "img-src 'self' data:"
)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_KEPT = (b"cache-control", b"public, max-age=31536000, immutable")
_FRESH = (b"cache-control", b"no-store")


class Gate:
    """ASGI middleware: 401 without the key."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif self._key is not None and not _holds(scope, self._key):
            await with_unread_body(problem_response(401, _NO_KEY, headers=_ASK))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def check_host(config: DashboardConfig, key: str | None) -> None:
    """Raises ConfigError if everybody on the network would have access."""
    if key is None and not is_loopback(config.host):
        raise ConfigError(
            f"dashboard.host is {config.host!r}, which others can reach, and no key is set; "
            f"set the environment variable {KEY_NAME}, or use dashboard.host=127.0.0.1"
        )


def _holds(scope: Scope, key: str) -> bool:
    given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, rest = given[0].partition(b" ")
    token = rest.strip()
    if scheme.lower() == b"basic":
        try:
            token = base64.b64decode(token, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != b"bearer":
        return False
    return hmac.compare_digest(token, key.encode())


class SafeHeaders:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_static = scope["path"].startswith("/static/") and message["status"] == 200
                more = [*_HEADERS, _KEPT if is_static else _FRESH]
                names = {name for name, _ in more}
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in names]
                message = {**message, "headers": [*kept, *more]}
            await send(message)

        await self._app(scope, receive, with_headers)
