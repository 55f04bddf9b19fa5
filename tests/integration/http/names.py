"""Names whose addresses a test decides, through the resolver that aiohttp lets a caller give."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult


class Names(AbstractResolver):
    """`name_example=[…]` answers for name.example: each question takes the next answer, the last one stays."""

    def __init__(self, **answers: Sequence[str]) -> None:
        self._answers = {name.replace("_", "."): list(addresses) for name, addresses in answers.items()}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        known = self._answers[host]
        return [answer(known.pop(0) if len(known) > 1 else known[0], port)]

    async def close(self) -> None:
        """Nothing is open."""


def answer(address: str, port: int) -> ResolveResult:
    """One address as a resolver gives it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return {"hostname": address, "host": address, "port": port, "family": family, "proto": 0, "flags": 0}
