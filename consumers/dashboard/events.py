"""`GET /events?show=overview`: the live fragments of a page as server-sent events."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from consumers.dashboard.live import FRAGMENTS, MOST_STREAMS, Live

router = APIRouter()


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
    """503 where too many listen already."""
    live: Live = request.app.state.live
    names = [name for name in FRAGMENTS if name in show.split(",")]
    if not names:
        raise HTTPException(404, "There is no such live part.")
    if live.streams >= MOST_STREAMS:
        raise HTTPException(503, "Too many pages are open; this one is not updated.", {"Retry-After": "30"})
    return _Counted(live, names)
