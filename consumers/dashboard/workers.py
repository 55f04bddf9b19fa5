"""Every process of the run over time: when it lived, worked, waited (and for what) and died; its speed, CPU, memory.

Also the page of the published weight versions: size, whether they are still on disk, and which workers have them.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from fastapi import APIRouter, Request, Response

from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.consumers.dashboard.overview import Keeper, Part, charts_json, points, stacked
from sluice.consumers.dashboard.render import live, render
from sluice.consumers.dashboard.timeline import HEIGHT, MOODS, STATES, UNITS, WIDTH, Track, state_of
from sluice.consumers.history.curves import Chart, line
from sluice.pipeline.errors import MessageError
from sluice.pipeline.roles import position
from sluice.pipeline.status.descriptions import stall_text
from sluice.pipeline.status.snapshot import Holder, Process
from sluice.pipeline.status.text import counted, wait_text
from sluice.pipeline.wire.messages import WeightVersion, decode

router = APIRouter()
_IN_COLUMNS = {
    "owner", "engine", "repeat_terminate", "version", "running", "tokens", "memory_bytes", "cpu_ms", "url", "metrics",
    "start_s",
}  # fmt: skip
_CLASSES = {"working": "calm", "waiting": "", "failed": "bad", "silent": "bad", "ended": "", "died": "bad"}
_LIVE = ("working", "waiting")
_ENDED = {"": "ended", "cleanly": "ended", "failed": "failed", "silent": "died"}
_SHARES = 3  # states named per process
_SHOWN = 24
_LONG = 2.0  # times the median: a version that took longer has a bar that is cut off
_DIGEST = b":digest"


class Line(NamedTuple):
    """One process; `row` is None for one that ended, `track` for one that was not seen yet."""

    name: str
    role: str
    row: Process | None
    track: Track | None
    state: str
    says: str  # what it waits for or why it ended
    css: str
    shares: str
    holds: str
    restarts: int
    unit: str  # of its rate
    facts: dict[str, Any]  # those that are not shown elsewhere

    @property
    def is_live(self) -> bool:
        """Whether what it last told is of now."""
        return self.state in _LIVE


@router.get("/workers")
def workers(request: Request) -> Response:  # in a thread: many processes take a while to draw
    """The page, with the newest snapshot."""
    return render(request, "workers.html.j2", **_parts(monitor_of(request)))


def _parts(monitor: Monitor) -> dict[str, Any]:
    now, tracks, bins = monitor.newest, monitor.timeline.tracks(), monitor.timeline.sitting()
    rows = {row.name: row for row in now.processes}
    names = [*rows, *(name for name, track in tracks.items() if name not in rows and track.lives)]
    held = {one.worker: one for one in now.holders}
    lines = [_line(name, rows.get(name), tracks.get(name), held.get(name)) for name in names]
    lines.sort(key=lambda line: (position(line.role), line.name))
    return {
        "lines": lines,
        "states": Counter(line.state for line in lines),
        "classes": _CLASSES,
        "moods": MOODS,
        "axis": (bins[0].at, max(bins[-1].until, bins[0].at + 1.0)) if bins else None,
        "wide": WIDTH,
        "high": HEIGHT,
        "blocked": [Keeper(stall, stall_text(now, stall)) for stall in now.stalls if stall.blocks],
    }


def _line(name: str, row: Process | None, track: Track | None, held: Holder | None) -> Line:
    life = track.lives[-1] if track and track.lives else None
    role = row.role if row else life.role if life else ""
    if row is not None:
        state = state_of(row)
        state = state if state in _CLASSES else "waiting"
        says = "" if row.wait is None or state != "waiting" else wait_text(row.wait)
        if row.error:
            says = f"{row.error_kind}: {row.error}"
    else:
        state, says = _ENDED[life.ended if life else ""], life.error if life else ""
    facts = row.facts if row else {}
    return Line(
        name=name,
        role=role,
        row=row,
        track=track,
        state=state,
        says=says,
        css=_CLASSES[state],
        shares=_shares(track),
        holds=_holds(facts if state in _LIVE else {}, held),
        restarts=max(0, len(track.lives) - 1) if track else 0,
        unit=UNITS.get(role, ""),
        facts={name: value for name, value in facts.items() if name not in _IN_COLUMNS},
    )


def _shares(track: Track | None) -> str:
    """What it did most of the time."""
    if track is not None and len(track.shares) == 1:
        return ""  # the state says it
    some = [(state, share) for state, share in (track.shares if track else ())[:_SHARES] if share >= 0.005]
    return ", ".join(f"{STATES.get(state, state.replace('_', ' '))} {share:.0%}" for state, share in some)


def _holds(facts: Mapping[str, Any], held: Holder | None) -> str:
    """Jobs and sequences that it has in hand."""
    jobs = counted(held.jobs, "job") if held else ""
    running, pending = facts.get("running"), facts.get("pending")
    if running:
        return f"{jobs}, {running:,} running" if jobs else f"{running:,} running"
    return f"{pending:,} pending" if pending else jobs


live("workers", "workers_live.html.j2", _parts)


class Version(NamedTuple):
    """One registered version; `manifest` and `num_bytes` are None once it is retired.

    `stages`: what its time went into. All bars have one scale, on which a few slow versions may be cut off.
    """

    number: int
    digest: str
    manifest: WeightVersion | None
    num_bytes: int | None
    served_by: list[str]
    stages: list[Part]


@router.get("/weights/curves")
async def weights_curves(request: Request) -> Response:
    """From the publication of a version to its first token, as JSON."""
    return charts_json(await asyncio.to_thread(_charts, monitor_of(request)))


def _charts(monitor: Monitor) -> list[Chart]:
    steps = monitor.curves.times_of_versions()
    newest = max(steps.values(), default=0.0)
    some = [(version, steps.get(version, newest), seconds) for version, seconds in monitor.index.loads().items()]
    about = "from the publication of a version to its first token, on the fastest worker"
    return [
        Chart(key="load", title="Publish to first token", unit="s", about=about, lines=[made], x="version")
        for made in [line("seconds", some)]
        if some
    ]


@router.get("/weights")
async def weights(request: Request) -> Response:
    """The newest `_SHOWN` versions."""
    monitor = monitor_of(request)
    table = await monitor.ask(cast(Any, monitor.client).hgetall(monitor.keys.versions))
    versions = await asyncio.to_thread(_versions, monitor, table)
    charts = [(chart, points(chart.lines[0].values)) for chart in await asyncio.to_thread(_charts, monitor)]
    parts = {"versions": versions[:_SHOWN], "total": len(versions), "retention": monitor.config.weights.retention}
    return render(request, "weights.html.j2", **parts, charts=charts)


def _versions(monitor: Monitor, table: dict[bytes, bytes]) -> list[Version]:
    """Newest first; only the sizes of shown ones are looked up."""
    served: dict[int, list[str]] = defaultdict(list)
    for row in monitor.newest.alive("worker"):
        if isinstance(number := row.facts.get("version"), int):
            served[number].append(row.name)
    names = {key.removesuffix(_DIGEST) for key in table}
    numbers = sorted((int(name) for name in names if name.isdigit()), reverse=True)
    monitor.curves.charts()
    times = {number: monitor.curves.stages_of(number) for number in numbers[:_SHOWN]}
    lasted = sorted(math.fsum(seconds for _, seconds in some) for some in times.values() if some)
    longest = min(lasted[-1], _LONG * lasted[len(lasted) // 2]) if lasted else 0.0
    return [
        _version(number, table, served[number], stacked(times.get(number, []), longest), with_size=at < _SHOWN)
        for at, number in enumerate(numbers)
    ]


def _version(
    number: int, table: dict[bytes, bytes], served_by: list[str], stages: list[Part], *, with_size: bool
) -> Version:
    name = str(number).encode()
    manifest = _manifest(table.get(name))
    digest = table.get(name + _DIGEST, b"").decode() or (manifest.digest if manifest else "")
    num_bytes = bytes_of(Path(manifest.path)) if manifest and with_size else None
    return Version(number, digest, manifest, num_bytes, served_by, stages)


def _manifest(raw: bytes | None) -> WeightVersion | None:
    try:
        return None if raw is None else decode(WeightVersion, raw)
    except MessageError:  # from a newer release: its digest is still shown
        return None


def bytes_of(directory: Path) -> int | None:
    """Size of the safetensors files; None if there are none here."""
    try:
        sizes = [file.stat().st_size for file in directory.glob("*.safetensors")]
    except OSError:
        return None
    return sum(sizes) if sizes else None
