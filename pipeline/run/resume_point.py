"""Where a run would resume: read from a running broker, else from the files. Writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from sluice.pipeline.broker import connection as connections
from sluice.pipeline.config import Config
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.run import preflight
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.weights.versions import newest_number
from sluice.pipeline.wire.codec import integer_or, shown
from sluice.pipeline.wire.keys import Keys

_LOOK_S = 10.0
Source = dict[bytes, bytes]


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run would resume."""

    kind: Literal["fresh", "goes_on", "complete", "unknown"]
    says: str
    version: int | None = None  # newest published weights
    cursor: str | None = None  # epoch:row of the newest job, from 0
    enqueued: int = 0  # sequences
    ended: int = 0  # of these: trained, dead or dropped


def resume_point(config: Config) -> tuple[ResumePoint, Source]:
    """The resume point, and the broker's record of the source; raises BrokerError."""
    _, facts = preflight.broker_facts(config)
    if not facts:
        return _by_files(config), {}
    try:
        now, source = asyncio.run(asyncio.wait_for(_ask(config), _LOOK_S))
    except TimeoutError as error:
        raise BrokerError(f"the broker did not report the run's progress within {_LOOK_S:.0f} s") from error
    return _by_broker(now, source), source


def read_cursor(raw: bytes) -> tuple[int, int] | None:
    """Epoch and row of a stored position, each -1 before the first; None if it isn't valid."""
    epoch, _, row = raw.partition(b":")
    found = integer_or(epoch, None, least=-1), integer_or(row, None, least=-1)
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def unknown(says: str) -> ResumePoint:
    """The resume point can't be determined."""
    return ResumePoint(kind="unknown", says=says)


def _by_broker(now: Snapshot, source: Source) -> ResumePoint:
    cursor = source.get(b"cursor")
    if cursor is None and not now.enqueued:
        return ResumePoint(kind="fresh", says="a fresh run: the broker has none of this name")
    version = "no weights yet" if now.latest_version is None else f"weights v{now.latest_version}"
    counts = f"{version}; {now.enqueued:,} sequences enqueued, {now.trained:,} trained, {now.dead:,} dead"
    epoch, row = read_cursor(cursor or b"0:-1") or (0, -1)
    says = f"resumes after row {row + 1:,} of epoch {epoch + 1}; {counts}"
    if now.complete:
        says = f"complete: nothing is left to do, and it would exit at once; {counts}; --set run=NAME starts another"
    return ResumePoint(
        kind="complete" if now.complete else "goes_on",
        says=says,
        version=now.latest_version,
        cursor=None if cursor is None else shown(cursor),
        enqueued=now.enqueued,
        ended=now.ended,
    )


async def _ask(config: Config) -> tuple[Snapshot, Source]:
    client, keys = connections.connect(config.broker, config.run), Keys(config.run)
    try:
        now = await snapshot(client, keys)
        return now, await cast("Awaitable[Source]", cast(Any, client).hgetall(keys.source))
    finally:
        await client.aclose()


def _by_files(config: Config) -> ResumePoint:
    home, data = Path(config.run_dir) / config.run, Path(config.broker.embedded_dir) / "appendonlydir"
    steps, versions = _numbered(home / "checkpoints", "step-*"), _numbered(home / "weights", "v*")
    if not steps and not versions:
        if not data.exists():
            return ResumePoint(
                kind="fresh", says=f"a fresh run: nothing in {home}, and the broker's directory is empty"
            )
        return unknown(
            f"{data.parent} has data of a broker; whether it belongs to this run is known only once the broker is "
            "started"
        )
    newest = ", ".join(paths[-1].name for paths in (steps, versions) if paths)
    version = newest_number(home / "weights") if versions else None
    kept = "the broker's data" if data.exists() else "NO broker data: rows would be read from the first one"
    return ResumePoint(kind="goes_on", says=f"resumes: {newest} in {home}, and {kept}", version=version)


def _numbered(directory: Path, pattern: str) -> list[Path]:
    """Oldest first; a number may outgrow six digits."""
    return sorted(directory.glob(pattern), key=lambda path: (len(path.name), path.name))
