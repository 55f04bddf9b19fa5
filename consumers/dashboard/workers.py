"""Every process of the run: alive or not, what it waits for, and its facts.

Also the page of the published weight versions: size, whether they are still on disk, and which workers have them.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple, cast

from fastapi import APIRouter, Request, Response

from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.consumers.dashboard.overview import Part, charts_json, points, stacked
from sluice.consumers.dashboard.render import live, render
from sluice.consumers.history.curves import Chart, line
from sluice.pipeline.errors import MessageError
from sluice.pipeline.roles import position
from sluice.pipeline.status.snapshot import Process
from sluice.pipeline.status.text import wait_text
from sluice.pipeline.wire.messages import WeightVersion, decode

router = APIRouter()
_IN_COLUMNS = {"owner", "engine", "repeat_terminate", "version", "running", "tokens", "memory_bytes", "url", "metrics"}
_CLASSES = {"working": "calm", "waiting": "", "failed": "bad", "silent": "bad"}
_SHOWN = 24
_DIGEST = b":digest"


class Line(NamedTuple):
    """One row of the process table."""

    row: Process
    state: str
    wait: str  # what it waits for, empty if it doesn't
    css: str
    guard: str
    tokens_per_s: float | None
    facts: dict[str, Any]  # those without a column


@router.get("/workers")
async def workers(request: Request) -> Response:
    """The page, with the newest snapshot."""
    return render(request, "workers.html.j2", **_parts(monitor_of(request)))


def _parts(monitor: Monitor) -> dict[str, Any]:
    rows = sorted(monitor.newest.processes, key=lambda row: (position(row.role), row.name))
    lines = [_line(monitor, row) for row in rows]
    return {
        "workers": [line for line in lines if line.row.role == "worker"],
        "others": [line for line in lines if line.row.role != "worker"],
        "alive": sum(line.state in ("working", "waiting") for line in lines),
    }


def _line(monitor: Monitor, row: Process) -> Line:
    state = _state(row)
    return Line(
        row=row,
        state=state,
        wait="" if row.wait is None else wait_text(row.wait),
        css=_CLASSES[state],
        guard="on" if "repeat_terminate" in row.facts else "off",
        tokens_per_s=monitor.process_rates.tokens_per_s(row),
        facts={name: value for name, value in row.facts.items() if name not in _IN_COLUMNS},
    )


def _state(row: Process) -> str:
    if row.ended_at is not None:
        return "failed"
    if not row.is_alive:
        return "silent"
    return "working" if row.wait is None else "waiting"


live("workers", "workers_live.html.j2", _parts)


class Version(NamedTuple):
    """One registered version; `manifest` and `num_bytes` are None once it is retired.

    `stages`: what its time went into, in a bar that is as long as the slowest version's shown.
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
    longest = max((math.fsum(seconds for _, seconds in some) for some in times.values()), default=0.0)
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
