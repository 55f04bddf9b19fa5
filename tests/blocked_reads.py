"""Calls that wait at a server for data, as idle workers and readers do."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.deadlines import HANG_S
from tests.roles import eventually


class BlockedReads:
    """A BLPOP and an XREAD without a limit; the client's socket timeout must be longer than the test."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._list, self._stream = client, f"{prefix}:list", f"{prefix}:stream"
        self.tasks = [
            asyncio.create_task(client.blpop(self._list)),
            asyncio.create_task(client.xread({self._stream: "0"}, block=0)),
        ]

    @classmethod
    async def begin(cls, client: Any, prefix: str = "blocked") -> BlockedReads:
        """Returns when the server holds both."""
        made = cls(client, prefix)

        async def are_held() -> bool:
            return (await client.info("clients"))["blocked_clients"] == len(made.tasks)

        await eventually(are_held, "the server to hold the reads")
        return made

    async def end(self) -> None:
        """Both get what they wait for."""
        await self._client.rpush(self._list, "item")
        await self._client.xadd(self._stream, {"field": "value"})
        popped, read = await asyncio.wait_for(asyncio.gather(*self.tasks), HANG_S)
        assert popped[1] == b"item"
        assert len(read) == 1
