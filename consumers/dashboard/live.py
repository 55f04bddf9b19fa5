"""Pushes changed fragments to browsers: server-sent events from `GET /events?show=overview`.

    Monitor.next ─▶ rendered once for all listeners ─▶ every stream that hasn't sent it

- A stream ends with the dashboard, with its browser, or after `_LIFE_S` (the browser reconnects).
- At most `MOST_STREAMS` at a time; one more gets a 503, and its page stays as loaded.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from sluice.consumers.dashboard.formats import clock
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.dashboard.render import fragment

MOST_STREAMS = 64
_LIFE_S = 900.0
_RETRY_MS = 2000

Values = Callable[[Monitor], dict[str, object]]
FRAGMENTS: dict[str, tuple[str, Values]] = {}
"""Name → its template, and what the template needs besides the snapshot."""
router = APIRouter()


class Live:
    """The fragments of one dashboard; pages register theirs with `add`."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor, self.streams = monitor, 0
        self._made: dict[str, tuple[int, str]] = {}

    def render(self, name: str) -> str:
        """A fragment for the newest snapshot; raises KeyError."""
        template, values = FRAGMENTS[name]
        made = self._made.get(name)
        if made is None or made[0] != self.monitor.number:
            made = self._made[name] = (self.monitor.number, fragment(self.monitor, template, **values(self.monitor)))
        return made[1]

    async def stream(self, names: Sequence[str]) -> AsyncIterator[bytes]:
        """Server-sent events: each changed fragment, and `tick` at every snapshot."""
        sent: dict[str, str] = {}
        until = time.monotonic() + _LIFE_S
        yield f"retry: {_RETRY_MS}\n\n".encode()
        while not self.monitor.closing.is_set() and time.monotonic() < until:
            fresh = {name: html for name in names if sent.get(name) != (html := self.render(name))}
            sent.update(fresh)
            yield "".join(
                [*(event(*one) for one in fresh.items()), event("tick", clock(self.monitor.seen_at))]
            ).encode()
            await self.monitor.next()


def add(name: str, template: str, values: Values = lambda monitor: {}) -> None:
    """A page's module calls this once."""
    FRAGMENTS[name] = (template, values)


def event(name: str, text: str) -> str:
    """One server-sent event; each line of text becomes a line of data."""
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in text.splitlines()) + "\n"


class _Counted(StreamingResponse):
    """Counts itself for exactly as long as it is open."""

    def __init__(self, live: Live, names: list[str]) -> None:
        super().__init__(live.stream(names), media_type="text/event-stream")
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._live.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._live.streams -= 1


@router.get("/events")
async def events(request: Request, show: str = "overview") -> Response:
    """503 if there are too many streams already."""
    live: Live = request.app.state.live
    names = [name for name in FRAGMENTS if name in show.split(",")]
    if not names:
        raise HTTPException(404, "No such live section.")
    if live.streams >= MOST_STREAMS:
        raise HTTPException(503, "Too many pages are open; this one is not updated.", {"Retry-After": "30"})
    return _Counted(live, names)
