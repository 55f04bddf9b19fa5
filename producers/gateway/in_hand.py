"""Requests in hand: at most so many, and each only as long as its caller is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from starlette.requests import Request

from producers.gateway.metrics import Metrics
from producers.gateway.refusals import Refusal

_T = TypeVar("_T")


class Gate:
    """Lets `most` requests in; the others are told to come again."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most, self.in_hand = most, 0
        self._metrics = metrics

    @contextlib.contextmanager
    def enter(self, count: int = 1) -> Iterator[None]:
        """Room for `count` prompts while the block lasts. Raises Refusal (429; 400 for more than there ever is)."""
        if count > self.most:
            raise Refusal(400, f"{count} prompts in one request; at most {self.most} (gateway.max_requests)")
        if self.in_hand + count > self.most:
            raise Refusal(429, f"{self.in_hand} requests are in hand, at most {self.most} (gateway.max_requests)")
        self._add(count)
        try:
            yield
        finally:
            self._add(-count)

    def _add(self, count: int) -> None:
        self.in_hand += count
        self._metrics.in_flight.set(self.in_hand)


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The work's result; it is cancelled when the caller goes away. Raises Refusal (499, which nobody reads)."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(499, "the caller went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
