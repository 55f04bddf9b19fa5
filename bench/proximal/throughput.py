"""Tokens a second while weights change every so many steps.

- Segments of every interval take turns; each begins with rows of evenly spread lengths, and counts the tokens from the
  moment at which all rows run. The longest interval has its one update in the middle one of its segments.
- An update is what a worker does: digest, load, probe, and the prefill that scores.
- The rate of an interval is that of all its segments together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.proximal.plan import Sizes, room
from sluice.bench.proximal.rows import requests, running
from sluice.bench.proximal.versions import COUNT, Variants
from sluice.pipeline.weights.versions import verify, write_version
from sluice.pipeline.wire.messages import WeightVersion
from sluice.workers.engine.contracts import Backend
from sluice.workers.weights_watch import probe_of

_TOLERANCE = 1e-2  # nats a probe token
Segment = tuple[int, float]
"""Tokens, seconds."""


async def throughput(backend: Backend, variants: Variants, sizes: Sizes, home: Path) -> dict[str, Any]:
    """The fields of one backend."""
    versions = [write_version(variants.directory(v), home, variants.manifest(v)) for v in range(COUNT)]
    names = [*map(str, sizes.intervals), "none"]
    found: dict[str, list[Segment]] = {name: [] for name in names}
    updates = dict.fromkeys(names, 0)
    for number in range(sizes.segments):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            due = due_steps(None if name == "none" else int(name), number, sizes.segment)
            found[name].append(await _segment(backend, versions, sizes, due, number * len(names) + names.index(name)))
            updates[name] += len(due)
    return {**fields(found), "updates": updates}


def fields(found: dict[str, list[Segment]]) -> dict[str, Any]:
    """What the segments come to."""
    return {
        "tok_s": {name: sum(n for n, _ in each) / sum(s for _, s in each) for name, each in found.items()},
        "spread": {name: [min(n / s for n, s in each), max(n / s for n, s in each)] for name, each in found.items()},
    }


def due_steps(interval: int | None, segment: int, steps: int) -> list[int]:
    """Steps of this segment at which an update is due; `interval` divides `steps`, or is a multiple of it."""
    if interval is None:
        return []
    if interval > steps:
        per_update = interval // steps
        return [steps // 2] if segment % per_update == per_update // 2 else []
    return list(range(interval // 2, steps, interval))


async def _segment(
    backend: Backend, versions: Sequence[WeightVersion], sizes: Sizes, due: Sequence[int], seed: int
) -> Segment:
    lengths = [index * sizes.longest // max(1, sizes.rows - 1) for index in range(sizes.rows)]
    asks = requests(backend.version, sizes.prompt, lengths, room(sizes), seed)
    async with running(backend, asks) as rows:
        await rows.until(lambda: rows.ready > 0, "the rows to run")
        for step in due:
            await rows.until(lambda step=step: rows.steps() >= step, f"step {step}")
            await _update(backend, versions)
        await rows.until(lambda: rows.steps() >= sizes.segment, f"step {sizes.segment}")
    tokens = sizes.segment * sizes.rows
    return tokens, rows.times[rows.ready + tokens - 1] - rows.times[rows.ready - 1]


async def _update(backend: Backend, versions: Sequence[WeightVersion]) -> None:
    """As workers/weights_watch.py does it."""
    number = backend.version + 1
    manifest = msgspec.structs.replace(versions[number % COUNT], version=number)
    probe = probe_of(manifest, backend.facts.dtype, _TOLERANCE)
    directory = await asyncio.to_thread(verify, manifest)
    await backend.load_weights(directory, number, probe)
