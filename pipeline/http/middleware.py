"""Who may call a server, in what form, and how much.

- `BearerAuth`: the inbound key, if one is set. No byte of the body is used before it is checked; it is compared in
  constant time, never logged and never part of an answer.
- `HostGate`: the names that a server without a key answers to. Another site's page can point its own name at this host,
  and its script could then read every answer. So the Host header must name this machine, the address the caller
  reached, or a name listed in the configuration.
- `JsonOnly`: POSTs must carry JSON and declare it. A browser sends forms and plain text to any host without a
  preflight; for `application/json` it sends one.
- `BodyLimit`: bytes are counted as they arrive; Content-Length is only a reason to stop sooner. Whatever the
  application makes of the cut body, the caller gets 413 unless an answer had already begun.
- A refused caller that is still sending can read its refusal. A connection closed with unread bytes is reset, so the
  answer is sent whole and whatever still arrives is discarded, within a time and size limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping, Sequence

from fastapi import HTTPException, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.pipeline.http.errors import problem_response

MOST_BYTES = 1 << 20
MOST_S, SILENT_S = 20.0, 2.0
_CLOSE = {"Connection": "close"}


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
    """Discard until the body ends, its limit is reached, or the caller goes silent."""
    num_bytes = 0
    while num_bytes <= max_bytes:
        async with asyncio.timeout(SILENT_S):
            message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def _refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> ASGIApp:
    """An error that closes its connection: the rest of the body must not be read as a next request."""
    return with_unread_body(problem_response(status, message, headers={**(headers or {}), **_CLOSE}))


def _given(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name.lower() == header]


OPEN_PATHS = ("/health",)
"""Answered to everybody: what starts a container asks here."""

_ASK = {"WWW-Authenticate": "Bearer"}
_MESSAGE = "the key is missing or wrong; send it as 'Authorization: Bearer KEY'"


class BearerAuth:
    """ASGI middleware: 401 unless the request has the key, as a bearer token or as `X-Api-Key`."""

    def __init__(self, app: ASGIApp, key: str | None, open_paths: Sequence[str] = OPEN_PATHS) -> None:
        self._app = app
        self._key = key
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or _holds(scope, self._key):
            await self._app(scope, receive, send)
        else:
            await _refusal(401, _MESSAGE, _ASK)(scope, receive, send)


def _holds(scope: Scope, key: str | None) -> bool:
    if key is None:
        return True
    given, alone = _given(scope, b"authorization"), _given(scope, b"x-api-key")
    if not given and len(alone) == 1:  # Anthropic's clients
        return hmac.compare_digest(alone[0].strip(), key.encode())
    if len(given) != 1:
        return False
    scheme, _, token = given[0].partition(b" ")
    return hmac.compare_digest(token.strip(), key.encode()) and scheme.lower() == b"bearer"


class HostGate:
    """ASGI middleware: 421 for a Host that isn't ours. `setting` is where further names are listed."""

    def __init__(self, app: ASGIApp, *, names: Iterable[str], setting: str, has_key: bool) -> None:
        self._app, self._setting, self._has_key = app, setting, has_key
        self._names = frozenset(map(host_name, names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._has_key or scope["path"] in OPEN_PATHS or self._is_ours(scope):
            await self._app(scope, receive, send)
        else:
            says = f"this server does not have that name; use localhost, or list the name in {self._setting}"
            await _refusal(421, says)(scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        given = _given(scope, b"host")
        name = host_name(given[0].decode("latin-1")) if len(given) == 1 else ""
        reached = str((scope.get("server") or ("", 0))[0]).lower()
        return name in self._names or is_loopback(name) or (bool(name) and name.strip("[]") == reached)


def is_loopback(name: str) -> bool:
    """Whether a name or address, without port, is loopback."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """A Host header, or a name as people write it, in lower case without its port."""
    name = value.strip().lower()
    if name.count(":") > 1 and not name.startswith("["):
        return f"[{name}]"
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.rpartition(":")[0] if ":" in name else name


class JsonOnly:
    """ASGI middleware: 415 for a POST of another content type."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _is_json(scope):
            await self._app(scope, receive, send)
        else:
            says = "a POST needs a JSON body; send it with 'Content-Type: application/json'"
            await _refusal(415, says)(scope, receive, send)


def _is_json(scope: Scope) -> bool:
    given = _given(scope, b"content-type")
    return len(given) == 1 and given[0].partition(b";")[0].strip().lower() == b"application/json"


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
                return  # the application's response to a cut body
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
        """`unread`: number of bytes that may still arrive."""
        message = f"the request is larger than {self._max_bytes} bytes; send less, or raise max_body_mb"
        response = problem_response(413, message, headers=_CLOSE)
        return with_unread_body(response, max(unread, MOST_BYTES)) if unread else response


def _declared(scope: Scope) -> int:
    """Declared Content-Length in bytes; 0 if missing or unreadable."""
    return max((int(value[:20]) for value in _given(scope, b"content-length") if value.isdigit()), default=0)
