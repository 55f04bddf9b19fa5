"""What every answer tells the browser: load nothing from elsewhere, run nothing inline, be framed by nobody."""

from __future__ import annotations

from pipeline.http.asgi import ASGIApp, Message, Receive, Scope, Send

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
