"""Ports that nobody listens on."""

from __future__ import annotations

import socket


def free_port(host: str, wanted: int) -> int:
    """`wanted` if it can be had now, else any free one; `wanted` too where the host is none of this machine."""
    for port in (wanted, 0):
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((host, port), family=family) as listener:
                return int(listener.getsockname()[1])
        except (OSError, OverflowError, UnicodeError):
            continue
    return wanted
