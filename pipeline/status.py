"""One look at a run: counts, versions, processes. Read by every role, the progress display and the tests.

It is one round trip; what takes more is in status_inspect.py and empty here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from pipeline.heartbeat import ALIVE_S, FORGET_S
from pipeline.keys import Keys
from pipeline.status_parts import BrokerUse, CreditUse, Depth, Lag, Lease, Process, Stall


class Snapshot(msgspec.Struct, kw_only=True):
    """Counts are sequences unless the name says otherwise; times are seconds."""

    schema_version: int = 3
    run: str
    state: str
    at: float = 0.0  # Unix time of the server
    enqueued: int = 0
    committed: int = 0
    accepted: int = 0
    trained: int = 0
    dead: int = 0
    dropped: int = 0
    tokens: int = 0
    redelivered_jobs: int = 0
    queued_jobs: int = 0
    open_rollouts: int = 0
    waiting_batches: int = 0
    latest_version: int | None = None
    total: int | None = None  # sequences that the source holds, once known
    exhausted: bool = False
    malformed_rows: int = 0
    replayed: int = 0  # dead ones that were enqueued again
    dead_letters: int = 0  # that wait to be replayed or dropped
    credit: CreditUse = CreditUse()
    reasons: dict[str, int] = {}
    metrics: dict[str, float] = {}
    processes: list[Process] = []
    # Of a close look only:
    depth: Depth | None = None
    leases: list[Lease] = []  # the oldest ones
    attempts: dict[str, int] = {}  # attempt → jobs that are leased with it
    deaths: int = 0  # of workers, over the jobs that are leased
    lag: list[Lag] = []
    latest_at: float | None = None  # Unix time at which the newest version was published
    broker: BrokerUse | None = None
    stalls: list[Stall] = []
    waits: list[str] = []  # in plain words: the stalls, then what each live process says of itself

    @property
    def ended(self) -> int:
        """Sequences in a terminal state."""
        return self.trained + self.dead + self.dropped

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.exhausted and self.ended == self.enqueued

    def alive(self, role: str) -> list[Process]:
        """Processes of a role with a fresh heartbeat."""
        now = time.time()
        return [row for row in self.processes if row.role == role and row.ended_at is None and now - row.at < ALIVE_S]

    @property
    def version_lag(self) -> int:
        """Versions between the newest and the oldest that a live worker decodes with."""
        held = [int(row.facts["version"]) for row in self.alive("worker") if "version" in row.facts]
        return max(0, (self.latest_version or 0) - min(held)) if held else 0


async def snapshot(client: Redis, keys: Keys) -> Snapshot:
    """Read everything in one round trip."""
    pipe: Any = client.pipeline(transaction=False)
    for key in (keys.counts, keys.source, keys.processes):
        pipe.hgetall(key)
    for key in (keys.latest, keys.state, keys.metrics):
        pipe.get(key)
    pipe.zcard(keys.jobs)
    pipe.zcard(keys.rollouts)
    pipe.xlen(keys.batches)
    pipe.xlen(keys.dead)
    pipe.time()
    answer = cast("list[Any]", await pipe.execute())
    counts, source, processes, latest, state, metrics, *sizes, (seconds, micros) = answer
    jobs, rollouts, batches, dead = map(int, sizes)
    number = {key.decode(): int(value) for key, value in counts.items() if b"last:" not in key}
    names = ("enqueued", "committed", "accepted", "trained", "dead", "dropped", "tokens", "replayed")
    counted: dict[str, Any] = {name: number.get(name, 0) for name in names}
    at = seconds + micros / 1e6
    return Snapshot(
        run=keys.run,
        state=(state or b"new").decode(),
        at=at,
        **counted,
        redelivered_jobs=number.get("redelivered", 0),
        queued_jobs=jobs,
        open_rollouts=rollouts,
        waiting_batches=batches,
        dead_letters=dead,
        latest_version=None if latest is None else int(latest),
        total=_number(source, b"total"),
        exhausted=source.get(b"exhausted") == b"1",
        malformed_rows=int(source.get(b"malformed", 0)),
        reasons={key: value for key, value in number.items() if ":" in key},
        metrics=_numbers(msgspec.json.decode(metrics, type=dict[str, Any]) if metrics else {}),
        processes=_processes(processes, at),
        credit=_credit(number, source, int(latest or 0)),
    )


def _credit(number: Mapping[str, int], source: dict[bytes, bytes], version: int) -> CreditUse:
    """As credit.lua reckons."""
    enqueued, trained, dead, dropped = (number.get(name, 0) for name in ("enqueued", "trained", "dead", "dropped"))
    per_version, staleness = _number(source, b"per_version"), _number(source, b"staleness")
    max_ahead = None
    if per_version is not None and staleness is not None:
        max_ahead = (staleness + 1) * per_version
        max_ahead += max(version * per_version - number.get("thinned", 0), trained)
    return CreditUse(
        sequences=enqueued - trained - dead - dropped,
        max_sequences=_number(source, b"max_in_flight") or None,
        bytes=number.get("bytes", 0),
        max_bytes=_number(source, b"max_bytes"),
        ahead=enqueued - dead - dropped,
        max_ahead=max_ahead,
        group=_number(source, b"group") or 1,
    )


def _number(table: dict[bytes, bytes], field: bytes) -> int | None:
    return int(table[field]) if field in table else None


def _processes(table: dict[bytes, bytes], now: float) -> list[Process]:
    """By name; those that died long ago are left out."""
    rows = sorted((msgspec.json.decode(raw, type=Process) for raw in table.values()), key=lambda row: row.name)
    for row in rows:
        row.age_s = round(max(0.0, now - row.at), 3)
        row.waiting_s = None if row.waiting_since is None else round(max(0.0, now - row.waiting_since), 3)
    return [row for row in rows if row.age_s < FORGET_S]


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """JSON has no NaN: a loss that was not finite comes as null, and is left out; so is what is no number at all."""
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}
