"""Several calls to the broker at a time, as a producer that does not wait for each answer makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

IN_FLIGHT = 4


async def in_flight(calls: Iterator[Awaitable[Any]], most: int = IN_FLIGHT) -> None:
    """Await all, `most` at a time, in order of their start."""

    async def pull() -> None:
        for call in calls:
            await call

    async with asyncio.TaskGroup() as group:
        for _ in range(most):
            group.create_task(pull())
