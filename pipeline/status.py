"""One look at a run: counts, depths, versions, processes. Read by `status`, the progress display and the tests."""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from pipeline.heartbeat import ALIVE_S, Heartbeat
from pipeline.keys import Keys


class Snapshot(msgspec.Struct, kw_only=True):
    """Counts are sequences unless the name says otherwise; times are seconds."""

    schema_version: int = 1
    run: str
    state: str
    enqueued: int = 0
    committed: int = 0
    accepted: int = 0
    trained: int = 0
    dead: int = 0
    dropped: int = 0
    tokens: int = 0
    redelivered_jobs: int = 0
    queued_jobs: int = 0
    waiting_batches: int = 0
    latest_version: int | None = None
    total: int | None = None  # sequences that the source holds, once known
    exhausted: bool = False
    malformed_rows: int = 0
    reasons: dict[str, int] = {}
    metrics: dict[str, float] = {}
    processes: list[Heartbeat] = []

    @property
    def ended(self) -> int:
        """Sequences in a terminal state."""
        return self.trained + self.dead + self.dropped

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.exhausted and self.ended == self.enqueued

    def alive(self, role: str) -> list[Heartbeat]:
        """Processes of a role with a fresh heartbeat."""
        now = time.time()
        return [row for row in self.processes if row.role == role and now - row.at < ALIVE_S]

    @property
    def version_lag(self) -> int:
        """Versions between the newest and the oldest that a live worker decodes with."""
        held = [int(row.facts.get("version", 0)) for row in self.alive("worker")]
        return max(0, (self.latest_version or 0) - min(held)) if held else 0


async def snapshot(client: Redis, keys: Keys) -> Snapshot:
    """Read everything in one round trip."""
    pipe: Any = client.pipeline(transaction=False)
    for key in (keys.counts, keys.source, keys.processes):
        pipe.hgetall(key)
    for key in (keys.latest, keys.state, keys.metrics):
        pipe.get(key)
    pipe.zcard(keys.jobs)
    pipe.xlen(keys.batches)
    counts, source, processes, latest, state, metrics, jobs, batches = cast("list[Any]", await pipe.execute())
    number = {key.decode(): int(value) for key, value in counts.items() if b"last:" not in key}
    return Snapshot(
        run=keys.run,
        state=(state or b"new").decode(),
        enqueued=number.get("enqueued", 0),
        committed=number.get("committed", 0),
        accepted=number.get("accepted", 0),
        trained=number.get("trained", 0),
        dead=number.get("dead", 0),
        dropped=number.get("dropped", 0),
        tokens=number.get("tokens", 0),
        redelivered_jobs=number.get("redelivered", 0),
        queued_jobs=int(jobs),
        waiting_batches=int(batches),
        latest_version=None if latest is None else int(latest),
        total=int(source[b"total"]) if b"total" in source else None,
        exhausted=source.get(b"exhausted") == b"1",
        malformed_rows=int(source.get(b"malformed", 0)),
        reasons={key: value for key, value in number.items() if ":" in key},
        metrics=_finite(msgspec.json.decode(metrics, type=dict[str, float | None]) if metrics else {}),
        processes=sorted(
            (msgspec.json.decode(raw, type=Heartbeat) for raw in processes.values()), key=lambda row: row.name
        ),
    )


def _finite(metrics: dict[str, float | None]) -> dict[str, float]:
    """JSON has no NaN: a loss that was not finite comes as null, and is left out."""
    return {key: value for key, value in metrics.items() if value is not None}
