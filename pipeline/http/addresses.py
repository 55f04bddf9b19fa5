"""Which URLs may be fetched, and to which addresses a connection may go.

- A host is matched exactly: only the listed port (the scheme's default if none is listed, any with "host:*").
- The address is checked when its socket is made, so a name can't resolve differently between check and use.
- A connection goes to the address that was checked; the name isn't resolved again.
- The list decides about private addresses. Link-local (cloud metadata), multicast and unspecified ones are always
  refused, and so is loopback, unless the list names a loopback host for the port, so no other name can reach this
  host's own services.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any

from yarl import URL

from sluice.pipeline.errors import RequestError

if TYPE_CHECKING:
    from aiohttp import TCPConnector
    from aiohttp.abc import AbstractResolver

_PORTS = {"http": 80, "https": 443}
_NAT64 = IPv6Network("64:ff9b::/96")


class RefusedAddress(Exception):
    """A connection was about to go to a forbidden address."""


class AllowedHosts:
    """Entries "host", "host:port" or "host:*" (any port), an IPv6 address in brackets; `key` is their setting."""

    def __init__(self, entries: Sequence[str], key: str) -> None:
        self._listed: set[tuple[str, int | str | None]] = {_listed(entry) for entry in entries}
        self._key = key

    def admit(self, text: str, where: str) -> URL:
        """The URL to fetch. Raises RequestError unless it is a plain http(s) URL of a listed host."""
        if not self._listed:
            raise RequestError(f"{where}: fetching URLs is off; set {self._key} in the configuration")
        if not text.isprintable() or " " in text or "\\" in text:
            raise RequestError(f"{where}: its URL has blanks, backslashes or control characters; encode them")
        try:
            url = URL(text)
        except (ValueError, IndexError) as error:  # IndexError: yarl on "http://host[]@"
            raise RequestError(f"{where}: its URL is malformed; correct it") from error
        if url.scheme not in _PORTS:
            raise RequestError(f"{where}: only http and https URLs are fetched")
        if url.raw_user is not None or url.raw_password is not None:
            raise RequestError(f"{where}: a user or password in a URL is not accepted; remove it")
        host, port = _normal_host(url.raw_host or ""), url.port or 0
        ports = (port, "*", None) if port == _PORTS[url.scheme] else (port, "*")
        if not any((host, port) in self._listed for port in ports):
            raise RequestError(
                f"{where}: {_shown(host, port)} is not a listed host; add it to {self._key} if you trust it"
            )
        return url.with_fragment(None)

    def open_socket(self, info: tuple[Any, ...]) -> socket.socket:
        """A socket for (family, type, protocol, name, address). Raises RefusedAddress."""
        family, kind, protocol, _, (address, port, *_) = info
        refuse_address(str(address))
        if _is_loopback(address) and not any(
            _is_local(host) and (at in (port, "*") or (at is None and port in _PORTS.values()))
            for host, at in self._listed
        ):
            raise RefusedAddress(
                f"its host resolves to {address}, this machine, and {self._key} has no 127.0.0.1, localhost or [::1] "
                f"with port {port}; list it if you mean that service"
            )
        return socket.socket(family=family, type=kind, proto=protocol)

    def connector(self, limit: int, resolver: AbstractResolver | None = None) -> TCPConnector:
        """Pooled connections of the running event loop, only to addresses that `open_socket` accepts."""
        from aiohttp import TCPConnector

        # one address at a time: a refused address ends the try instead of losing a race
        return TCPConnector(limit=limit, happy_eyeballs_delay=None, socket_factory=self.open_socket, resolver=resolver)


def refuse_address(text: str) -> None:
    """Raise RefusedAddress for a link-local, multicast or unspecified address, however it is wrapped."""
    for address in _unwrapped(text):
        kinds = ("link_local", "multicast", "unspecified")
        kind = next((kind for kind in kinds if getattr(address, f"is_{kind}")), None)
        if kind is not None:
            raise RefusedAddress(
                f"its host resolves to {text}, a {kind.replace('_', '-')} address, which is never fetched from; "
                "correct the URL or the DNS records"
            )


def _is_loopback(text: str) -> bool:
    return any(address.is_loopback for address in _unwrapped(text))


def _is_local(host: str) -> bool:
    """Whether a listed host is a name for this host itself."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unwrapped(text: str) -> list[IPv4Address | IPv6Address]:
    """The address, plus the IPv4 address embedded in it (mapped, 6to4, NAT64)."""
    address = ip_address(text.partition("%")[0])
    found = [address]
    if isinstance(address, IPv6Address):
        found += [inner for inner in (address.ipv4_mapped, address.sixtofour) if inner is not None]
        if address in _NAT64:
            found.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return found


def _listed(entry: str) -> tuple[str, int | str | None]:
    """(host, port); port None means the scheme's default, "*" any."""
    url = URL(f"http://{entry.removesuffix(':*')}")
    return _normal_host(url.raw_host or ""), "*" if entry.endswith(":*") else url.explicit_port


def _normal_host(host: str) -> str:
    """Lower case, canonical IP address, no trailing dot."""
    host = host.lower().removesuffix(".")
    try:
        return str(ip_address(host))
    except ValueError:
        return host


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
