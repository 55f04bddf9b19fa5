"""All runs of a fleet (`worker.runs`) on one page: what each does, what it got of the workers, what blocks it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from sluice.consumers.dashboard.render import render
from sluice.pipeline.config.types import Config
from sluice.pipeline.status import fleet
from sluice.pipeline.status.descriptions import condition, stall_text

router = APIRouter()
_KEPT_S = 1.5  # how often the runs are looked at, however many browsers ask


class FleetLooks:
    """The newest look at all runs, and tokens/s since the one before."""

    def __init__(self, config: Config) -> None:
        self._config, self._lock = config, asyncio.Lock()
        self._looks: list[fleet.RunLook] = []
        self._at = float("-inf")
        self._tokens: dict[str, tuple[float, int]] = {}  # run -> Unix s of its broker, tokens
        self._rates: dict[str, float] = {}

    async def newest(self) -> tuple[list[fleet.RunLook], dict[str, float]]:
        """Every run, and tokens/s by run."""
        async with self._lock:
            if time.monotonic() - self._at > _KEPT_S:
                self._looks = await fleet.look(self._config)
                self._at = time.monotonic()
                for each in self._looks:
                    self._count(each)
            return self._looks, self._rates

    def _count(self, each: fleet.RunLook) -> None:
        if (now := each.now) is None:
            self._rates.pop(each.name, None)
            return
        at, tokens = self._tokens.get(each.name, (now.at, now.tokens))
        if now.at > at:
            self._rates[each.name] = max(0.0, (now.tokens - tokens) / (now.at - at))
        self._tokens[each.name] = now.at, now.tokens


@router.get("/fleet")
async def page(request: Request) -> Response:
    """The table."""
    return render(request, "fleet.html.j2", **await _parts(request))


@router.get("/fleet/live")
async def live(request: Request) -> Response:
    """The table alone, for the page that is open."""
    return render(request, "fleet_live.html.j2", **await _parts(request))


async def _parts(request: Request) -> dict[str, Any]:
    looks: FleetLooks | None = getattr(request.app.state, "fleet", None)
    if looks is None:
        raise HTTPException(404, "This dashboard shows one run; `sluice dashboard -c FLEET.yaml` shows a fleet.")
    found, rates = await looks.newest()
    total = sum(rates.values())
    return {
        "lines": [
            {
                "look": each,
                "now": each.now,
                "condition": each.now and condition(each.now),
                "rate": rates.get(each.name),
                "share": rates[each.name] / total if total and each.name in rates else None,
                "workers": each.now and fleet.workers(each.now),
                "stalls": [stall_text(each.now, one).says for one in each.now.stalls if one.blocks] if each.now else [],
            }
            for each in found
        ]
    }
