"""Who may look.

- With a key: HTTP Basic (any user name, the key as password) or a bearer token; compared in constant time.
- Without one, only this machine: the address that is bound is a loopback one (`check_host`), and the Host header names
  this machine or one of `dashboard.hosts`, so that no page of another site can reach it under a name of its own.
- `/health` is answered to everybody.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Iterable

from pipeline.config.operate_types import DashboardConfig
from pipeline.errors import ConfigError
from pipeline.http.asgi import ASGIApp, Receive, Scope, Send
from pipeline.http.auth import OPEN_PATHS
from pipeline.http.errors import problem_response
from pipeline.http.unread import with_unread_body

KEY_NAME = "SLUICE_DASHBOARD_KEY"
_ASK = {"WWW-Authenticate": 'Basic realm="Sluice dashboard", charset="UTF-8"', "Connection": "close"}
_NO_KEY = "the key is missing or wrong; give it as the password (any user name), or as 'Authorization: Bearer KEY'"


class Gate:
    """ASGI middleware: 401 without the key; where there is none, 421 for a Host that is not ours."""

    def __init__(self, app: ASGIApp, key: str | None, hosts: Iterable[str] = ()) -> None:
        self._app, self._key = app, key
        self._hosts = frozenset(name.lower() for name in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif self._key is not None and not _holds(scope, self._key):
            await with_unread_body(problem_response(401, _NO_KEY, headers=_ASK))(scope, receive, send)
        elif self._key is None and not self._is_ours(scope):
            says = "this name is not one of the dashboard's; open it as localhost, or list the name in dashboard.hosts"
            refusal = problem_response(421, says, headers={"Connection": "close"})
            await with_unread_body(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"host"]
        name = host_name(given[0].decode("latin-1")) if len(given) == 1 else ""
        return name in self._hosts or is_loopback(name)


def check_host(config: DashboardConfig, key: str | None) -> None:
    """Raises ConfigError where everybody on the network could look."""
    if key is None and not is_loopback(config.host):
        raise ConfigError(
            f"dashboard.host is {config.host!r}, which others can reach, and no key is set; "
            f"set the environment variable {KEY_NAME}, or use dashboard.host=127.0.0.1"
        )


def is_loopback(name: str) -> bool:
    """Whether a name or address, without port, is this machine's own for itself."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """A Host header without its port, in lower case."""
    name = value.strip().lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.rpartition(":")[0] if ":" in name else name


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
