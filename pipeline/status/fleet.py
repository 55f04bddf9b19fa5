"""The runs of a fleet (`worker.runs`) side by side, for `sluice status` and the dashboard.

A run whose configuration or broker can't be read is a line too, with the reason; it hides none of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from redis.exceptions import RedisError

from sluice.pipeline.broker import connection
from sluice.pipeline.config import Config
from sluice.pipeline.config.run_origin import run_named
from sluice.pipeline.config.types import FleetRun
from sluice.pipeline.errors import BrokerError, SluiceError
from sluice.pipeline.status.descriptions import condition
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.report import as_json as run_as_json
from sluice.pipeline.status.run_end import run_directory
from sluice.pipeline.status.snapshot import Snapshot
from sluice.pipeline.terminal import columns
from sluice.pipeline.wire.keys import Keys

_LOOK_S = 5.0
_HEAD = (
    "run", "weight", "priority", "quota", "state", "weights", "ready", "running", "tokens", "share", "trained", "dead",
    "workers", "stalls",
)  # fmt: skip


@dataclass(frozen=True)
class RunLook:
    """One run of a fleet, as it is now."""

    entry: FleetRun
    name: str  # of the run; of its file, where that can't be read
    now: Snapshot | None
    problem: str = ""  # why there is no snapshot


async def look(fleet: Config) -> list[RunLook]:
    """All runs, at the same time; never raises for one of them."""
    return list(await asyncio.gather(*(_one(entry) for entry in fleet.worker.runs)))


async def _one(entry: FleetRun) -> RunLook:
    name = Path(entry.config).stem
    try:
        config = await asyncio.to_thread(run_named, entry.config)
        name = config.run
        async with asyncio.timeout(_LOOK_S):
            client = connection.connect(config.broker, config.run)
            try:
                now = await inspect(client, Keys(name), config.consumer.count, run_directory(config))
            finally:
                await client.aclose()
        return RunLook(entry, name, now)
    except TimeoutError:
        return RunLook(entry, name, None, f"its broker doesn't answer within {_LOOK_S:g} s")
    except (SluiceError, RedisError, OSError, msgspec.MsgspecError) as error:
        return RunLook(entry, name, None, str(error) or repr(error))


def shares(looks: Sequence[RunLook]) -> dict[str, float]:
    """Of all tokens that were sampled for these runs, by name."""
    tokens = {each.name: each.now.tokens for each in looks if each.now is not None}
    return {name: count / max(1, sum(tokens.values())) for name, count in tokens.items()}


def workers(now: Snapshot) -> int:
    """Live ones of a run."""
    return len(now.alive("worker"))


def as_text(looks: Sequence[RunLook]) -> str:
    """A line for each run; what blocks one is in `sluice status` of that run."""
    share, rows = shares(looks), list[list[str]]()
    for each in looks:
        terms = [f"{each.entry.weight:g}", str(each.entry.priority), str(each.entry.quota or "-")]
        if (now := each.now) is None:
            rows.append([each.name, *terms, f"UNKNOWN: {each.problem}"])
            continue
        version = "-" if now.latest_version is None else f"v{now.latest_version}"
        jobs = ["-", "-"] if now.depth is None else [f"{now.depth.ready:,}", f"{now.depth.running:,}"]
        counts = [f"{now.tokens:,}", f"{share[each.name]:.0%}", f"{now.trained:,}", f"{now.dead:,}", str(workers(now))]
        stalls = ", ".join(stall.kind for stall in now.stalls if stall.blocks) or "-"
        rows.append([each.name, *terms, condition(now), version, *jobs, *counts, stalls])
    unknown = [row for row in rows if len(row) != len(_HEAD)]
    known = columns([list(_HEAD), *(row for row in rows if len(row) == len(_HEAD))])
    return "\n".join([f"fleet of {len(looks)} runs", *known, *(f"  {'  '.join(row)}" for row in unknown)])


def as_json(looks: Sequence[RunLook]) -> dict[str, object]:
    """`runs`: each with its terms and `now`, which is what `sluice status --json` prints of it, or null."""
    share = shares(looks)
    return {
        "schema_version": 1,
        "runs": [
            {
                "run": each.name,
                **msgspec.to_builtins(each.entry),
                "share": share.get(each.name),
                "problem": each.problem,
                "now": each.now and run_as_json(each.now),
            }
            for each in looks
        ],
    }


def answering(looks: Sequence[RunLook]) -> None:
    """Raises BrokerError if no run could be looked at."""
    if looks and all(each.now is None for each in looks):
        raise BrokerError(f"no run of the fleet could be looked at; the first: {looks[0].problem}")
