"""Which names a server without a key answers to.

A page of another site can make its own name lead to this host, and its script may then read every answer. With a key it
has nothing to show; without one, the Host header must name this machine, the address that the caller reached, or a name
that the configuration lists.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from pipeline.http.asgi import ASGIApp, Receive, Scope, Send
from pipeline.http.auth import OPEN_PATHS
from pipeline.http.errors import problem_response
from pipeline.http.unread import with_unread_body


class HostGate:
    """ASGI middleware: 421 for a Host that is not ours. `setting` is where further names are listed."""

    def __init__(self, app: ASGIApp, *, names: Iterable[str], setting: str, has_key: bool) -> None:
        self._app, self._setting, self._has_key = app, setting, has_key
        self._names = frozenset(map(host_name, names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._has_key or scope["path"] in OPEN_PATHS or self._is_ours(scope):
            await self._app(scope, receive, send)
        else:
            says = f"this server has no such name; ask it as localhost, or list the name in {self._setting}"
            refusal = problem_response(421, says, headers={"Connection": "close"})
            await with_unread_body(refusal)(scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"host"]
        name = host_name(given[0].decode("latin-1")) if len(given) == 1 else ""
        reached = str((scope.get("server") or ("", 0))[0]).lower()
        return name in self._names or is_loopback(name) or (bool(name) and name.strip("[]") == reached)


def is_loopback(name: str) -> bool:
    """Whether a name or address, without port, is this machine's own for itself."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """A Host header, or a name as people write it, without its port and in lower case."""
    name = value.strip().lower()
    if name.count(":") > 1 and not name.startswith("["):
        return f"[{name}]"
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.rpartition(":")[0] if ":" in name else name
