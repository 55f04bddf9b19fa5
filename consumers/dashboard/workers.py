"""Every process of the run: alive or not, what it waits for, and what it says of itself."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from consumers.dashboard import live
from consumers.dashboard.look import Look, look_of
from consumers.dashboard.render import render
from pipeline.status.snapshot import Process

router = APIRouter()
_ROLES = ("producer", "gateway", "worker", "consumer", "scorer", "trainer", "dashboard")
_IN_COLUMNS = {"owner", "engine", "repeat_terminate", "version", "running", "tokens", "memory_bytes", "url", "metrics"}
_CLASSES = {"working": "calm", "waiting": "", "failed": "bad", "silent": "bad"}


class Line(NamedTuple):
    """One process as the table shows it."""

    row: Process
    state: str
    css: str
    guard: str
    tokens_per_s: float | None
    facts: dict[str, Any]  # those without a column


@router.get("/workers")
async def workers(request: Request) -> Response:
    """The page, with the newest look."""
    return render(request, "workers.html.j2", **_parts(look_of(request)))


def _parts(look: Look) -> dict[str, Any]:
    rows = sorted(look.newest.processes, key=lambda row: (_place(row.role), row.name))
    lines = [_line(look, row) for row in rows]
    return {
        "workers": [line for line in lines if line.row.role == "worker"],
        "others": [line for line in lines if line.row.role != "worker"],
        "alive": sum(line.state in ("working", "waiting") for line in lines),
    }


def _line(look: Look, row: Process) -> Line:
    state = _state(row)
    return Line(
        row=row,
        state=state,
        css=_CLASSES[state],
        guard="on" if "repeat_terminate" in row.facts else "off",
        tokens_per_s=look.process_rates.tokens_per_s(row),
        facts={name: value for name, value in row.facts.items() if name not in _IN_COLUMNS},
    )


def _state(row: Process) -> str:
    if row.ended_at is not None:
        return "failed"
    if not row.is_alive:
        return "silent"
    return "waiting" if row.waiting_for else "working"


def _place(role: str) -> int:
    return _ROLES.index(role) if role in _ROLES else len(_ROLES)


live.add("workers", "workers_live.html.j2", _parts)
