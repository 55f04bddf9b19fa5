"""A snapshot of a run: counts, versions, processes. Read by every role, the progress panel and the tests.

`snapshot` is one round trip. Fields that take more are empty here; `inspection.inspect` fills them in. Times are
seconds by the server's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec
from redis.asyncio import Redis

from sluice.pipeline.errors import MessageError
from sluice.pipeline.roles import ONLOOKERS
from sluice.pipeline.status.evaluation import Evaluation, read_evaluation
from sluice.pipeline.status.heartbeat import ALIVE_S, FORGET_S, Heartbeat, read_row
from sluice.pipeline.status.run_end import RunEnd
from sluice.pipeline.wire.codec import LEAST, Unreadable, integer, read_json
from sluice.pipeline.wire.keys import Keys, type_of

_FULL = 0.99


MOST_JOBS = 1000
"""An inspection reads that many of the jobs that aren't ready."""


class Depth(msgspec.Struct, kw_only=True):
    """Jobs in the queue; if `seen_all` is false, leases, attempts and holders cover the first MOST_JOBS only."""

    ready: int = 0
    running: int = 0  # leased
    deferred: int = 0
    alone: int = 0  # waiting for an empty worker
    oldest_s: float | None = None  # age since enqueue of the next ready job
    seen_all: bool = True


class Lease(msgspec.Struct, kw_only=True):
    """One job that a worker holds."""

    job_id: str
    worker: str
    attempt: int
    age_s: float  # since it was enqueued
    held_s: float | None  # since this attempt claimed it
    left_s: float  # until the lease expires, unless it is renewed
    sequences: int
    committed: int
    deaths: int  # workers that it killed
    alone: bool


class Holder(msgspec.Struct, kw_only=True):
    """What one worker holds, of the first MOST_JOBS jobs."""

    worker: str
    jobs: int = 0
    retried: int = 0  # of these, second or later attempts
    sequences: int = 0
    committed: int = 0
    oldest_s: float = 0.0  # since the first of them was claimed


class Lag(msgspec.Struct, kw_only=True):
    """One stream."""

    stream: str
    entries: int
    taken: int  # read by its owner, not acked
    oldest_s: float | None
    unread_s: float | None = None  # age of the oldest entry that its owner hasn't read


class CreditUse(msgspec.Struct, frozen=True, kw_only=True):
    """Credit held by unfinished sequences, dead letters included; the limits are the producer's, once it ran."""

    sequences: int = 0
    max_sequences: int | None = None
    bytes: int = 0
    max_bytes: int | None = None
    ahead: int = 0  # enqueued sequences that are trained or may still be
    max_ahead: int | None = None  # limit of `ahead`: what is trained, and (staleness + 1) versions' worth
    group: int = 1  # sequences in the next job

    @property
    def is_used_up(self) -> bool:
        """Whether the producer has to wait."""
        return bool(self.used_up)

    @property
    def used_up(self) -> list[Literal["sequences", "bytes", "versions"]]:
        """The limits that have been reached."""
        found: list[Literal["sequences", "bytes", "versions"]] = []
        if self.max_sequences is not None and self.sequences + self.group > self.max_sequences:
            found.append("sequences")
        if self.max_bytes is not None and self.bytes >= self.max_bytes:
            found.append("bytes")
        if self.max_ahead is not None and self.ahead + self.group > self.max_ahead:
            found.append("versions")
        return found


class BrokerUse(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's own numbers."""

    used_bytes: int = 0
    max_bytes: int | None = None  # None: no limit
    policy: str = "noeviction"  # any other policy loses data when the broker is full
    aof: bool = False  # data survives a power loss
    version: str = ""
    refused: int = 0  # writes refused for lack of memory since its start
    read_only: Literal["", "disk", "replica", "alone"] = ""  # why it refuses all writes now

    @property
    def is_full(self) -> bool:
        """Whether it refuses writes, or is about to."""
        return self.max_bytes is not None and self.used_bytes >= _FULL * self.max_bytes


StallKind = Literal[
    "no_process", "no_producer", "no_worker", "no_consumer", "no_trainer", "no_scorer", "no_gateway",
    "no_evaluator",
    "old_versions", "credit_exhausted", "trainer_dead", "consumer_lag", "broker_full", "guard_refused",
    "broker_read_only", "process_failed", "run_failed", "runs_alone", "unreadable",
]  # fmt: skip


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a run is stuck, or slower than it could be. `descriptions.stall_text` has its text."""

    kind: StallKind
    role: str | None = None  # the role of its stage
    process: str | None = None  # the process that failed, fell silent, or is waiting
    since: float | None = None  # Unix s, if known
    blocks: bool = True  # False: it ends by itself as long as the rest of the run continues


class Process(Heartbeat, kw_only=True):
    """One process's row, and how old it is."""

    age_s: float = 0.0
    waiting_s: float | None = None

    @property
    def is_onlooker(self) -> bool:
        """Whether the run can continue without it."""
        return self.role in ONLOOKERS

    @property
    def is_alive(self) -> bool:
        """Whether its heartbeat is fresh, and not its last one."""
        return self.ended_at is None and self.age_s < ALIVE_S


_SOURCE_NUMBERS = (b"total", b"malformed", b"max_in_flight", b"max_bytes", b"per_version", b"staleness", b"group")
_told = Unreadable()  # reported by this process


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
    stepped: int = 0  # in steps of the trainer that no checkpoint holds yet
    dead: int = 0
    dropped: int = 0
    evaluated: int = 0  # sequences of held-out prompts; not in enqueued
    answered: int = 0  # went to a caller, not to the trainer; no longer in enqueued
    withdrawn: int = 0  # dropped by the trainer; no longer in accepted
    tokens: int = 0
    redelivered_jobs: int = 0
    queued_jobs: int = 0
    evaluating_jobs: int = 0  # of these
    open_rollouts: int = 0
    waiting_batches: int = 0
    latest_version: int | None = None
    total: int | None = None  # sequences in the source, once known
    exhausted: bool = False
    malformed_rows: int = 0
    replayed: int = 0  # dead sequences enqueued again
    dead_letters: int = 0  # waiting to be replayed or dropped
    credit: CreditUse = CreditUse()
    reasons: dict[str, int] = {}
    metrics: dict[str, float] = {}
    evaluation: Evaluation = Evaluation()
    processes: list[Process] = []
    unreadable: list[str] = []  # skipped entries: key, entry, and why
    # Set by an inspection only:
    depth: Depth | None = None
    leases: list[Lease] = []  # the oldest ones
    holders: list[Holder] = []  # by name
    attempts: dict[str, int] = {}  # attempt → jobs that are leased with it
    deaths: int = 0  # of workers, over the leased jobs
    lag: list[Lag] = []
    latest_at: float | None = None  # Unix time at which the newest version was published
    broker: BrokerUse | None = None
    end: RunEnd | None = None  # how the run's supervisor ended, unless one of its processes has been heard of since
    stalls: list[Stall] = []

    @property
    def is_stopped(self) -> bool:
        """Whether its supervisor was interrupted, or its trainer ended at trainer.max_versions or by evaluations."""
        if self.end is not None:
            return self.end.state in ("interrupted", "stopped")
        return self.state == "stopped" and not self.alive("trainer")  # without a supervisor: the trainer's last word

    @property
    def stopped_by_evaluations(self) -> str:
        """What they said; "" if something else ended the run, or nothing did."""
        if self.end is not None:
            return self.end.cause if self.end.is_by_evaluations else ""
        return self.evaluation.stops if self.is_stopped else ""

    @property
    def ended(self) -> int:
        """Sequences in a terminal state."""
        return self.trained + self.dead + self.dropped

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.exhausted and self.ended == self.enqueued

    def process(self, name: str | None) -> Process | None:
        """The row with that name."""
        return next((row for row in self.processes if row.name == name), None)

    def alive(self, role: str) -> list[Process]:
        """Processes of a role with a fresh heartbeat."""
        return [row for row in self.processes if row.role == role and row.is_alive]

    @property
    def first_jobs(self) -> int | None:
        """How many jobs the leases, attempts and holders are of; None if of all."""
        return None if self.depth is None or self.depth.seen_all else MOST_JOBS

    @property
    def version_lag(self) -> int:
        """Versions between the newest and the oldest that a live worker decodes with."""
        held = [row.version for row in self.alive("worker") if row.version is not None]
        return max(abs((self.latest_version or 0) - one) for one in held) if held else 0


async def snapshot(client: Redis, keys: Keys) -> Snapshot:
    """Read everything in one round trip. Unreadable entries are left out, and listed in `unreadable`."""
    pipe: Any = client.pipeline(transaction=False)
    for key in (keys.counts, keys.source, keys.processes):
        pipe.hgetall(key)
    for key in (keys.latest, keys.state, keys.metrics, keys.evaluation):
        pipe.get(key)
    pipe.zcard(keys.jobs)
    pipe.zcard(keys.rollouts)
    pipe.xlen(keys.batches)
    pipe.xlen(keys.dead)
    pipe.time()
    answers = cast("list[Any]", await pipe.execute(raise_on_error=False))
    names = [keys.counts, keys.source, keys.processes, keys.latest, keys.state, keys.metrics, keys.evaluation]
    names += [keys.jobs, keys.rollouts, keys.batches, keys.dead, "TIME"]
    read = Reading()
    found = list(map(read.answer, names, answers))
    counts, source, processes, latest, state, metrics, evaluation, *sizes, (seconds, micros) = found
    jobs, rollouts, batches, dead = (int(size or 0) for size in sizes)
    counts, source = cast("dict[bytes, bytes]", counts or {}), cast("dict[bytes, bytes]", source or {})
    number = read.numbers(keys.counts, {name: raw for name, raw in counts.items() if b"last:" not in name})
    held = read.numbers(keys.source, {name: source[name] for name in _SOURCE_NUMBERS if name in source})
    sound = not read.skipped  # otherwise it's unknown whether the run is over
    version = read.numbers(keys.latest, {b"latest": latest} if latest is not None else {}).get("latest")
    sequences = (
        "enqueued",
        "committed",
        "accepted",
        "trained",
        "stepped",
        "dead",
        "dropped",
        "evaluated",
        "withdrawn",
        "tokens",
        "replayed",
    )
    counted: dict[str, Any] = {name: number.get(name, 0) for name in sequences}
    at = seconds + micros / 1e6
    return Snapshot(
        run=keys.run,
        state=(state or b"new").decode(errors="replace"),
        at=at,
        **counted,
        answered=number.get("called", 0) + number.get("replied", 0),
        redelivered_jobs=number.get("redelivered", 0),
        queued_jobs=jobs,
        evaluating_jobs=number.get("evaluating", 0),
        open_rollouts=rollouts,
        waiting_batches=batches,
        dead_letters=dead,
        latest_version=version,
        total=held.get("total"),
        exhausted=sound and source.get(b"exhausted") == b"1",
        malformed_rows=held.get("malformed", 0),
        reasons={key: value for key, value in number.items() if ":" in key},
        metrics=read.metrics(keys.metrics, metrics),
        evaluation=read.evaluation(keys.evaluation, evaluation),
        processes=read.processes(keys.processes, processes or {}, at),
        credit=_credit(number, held),
        unreadable=read.skipped,
    )


class Reading:
    """The entries of one read; `skipped` are the unreadable ones."""

    def __init__(self, skipped: list[str] | None = None) -> None:
        self.skipped: list[str] = [] if skipped is None else skipped

    def answer(self, key: str, answer: Any) -> Any:
        """None for a key with another type than ours; raises any other Redis error."""
        if not isinstance(answer, Exception):
            return answer
        if "WRONGTYPE" not in str(answer):
            raise answer
        self.skip(key, "", f"it must be a {type_of(key)}")
        return None

    def numbers(self, key: str, table: dict[bytes, bytes]) -> dict[str, int]:
        """The numeric ones, by name."""
        found: dict[str, int] = {}
        for name, raw in table.items():
            try:
                found[name.decode(errors="replace")] = integer(raw, "it", least=LEAST)
            except MessageError as error:
                self.skip(key, name, error)
        return found

    def metrics(self, key: str, raw: bytes | None) -> dict[str, float]:
        """JSON has no NaN: a non-finite loss arrives as null and is left out, like anything that isn't a number."""
        try:
            found = read_json(raw, dict[str, Any], "it") if raw else {}
        except MessageError as error:
            self.skip(key, "", error)
            return {}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def evaluation(self, key: str, raw: bytes | None) -> Evaluation:
        try:
            return read_evaluation(raw)
        except MessageError as error:
            self.skip(key, "", error)
            return Evaluation()

    def processes(self, key: str, table: dict[bytes, bytes], now: float) -> list[Process]:
        """By name; those that died long ago are left out."""
        rows: list[Process] = []
        for name, raw in table.items():
            try:
                row = read_row(raw, Process)
            except MessageError as error:
                self.skip(key, name, error)
                continue
            row.age_s = round(abs(now - row.at), 3)  # a row ahead of a clock that was set back is as old as the step
            since = None if row.wait is None else row.wait.since
            row.waiting_s = None if since is None else round(max(0.0, now - since), 3)
            if row.age_s < FORGET_S:
                rows.append(row)
        return sorted(rows, key=lambda row: row.name)

    def skip(self, key: str, entry: bytes | str, problem: object) -> None:
        """Leave one out, and report it once."""
        self.skipped.append(_told.skip(key, entry, problem))


def _credit(number: Mapping[str, int], held: Mapping[str, int]) -> CreditUse:
    """Computed as in credit.lua."""
    enqueued, trained, dead, dropped = (number.get(name, 0) for name in ("enqueued", "trained", "dead", "dropped"))
    stepped = number.get("stepped", 0)
    per_version, staleness = held.get("per_version"), held.get("staleness")
    max_ahead = None
    if per_version is not None and staleness is not None:
        max_ahead = (staleness + 1) * per_version + trained + stepped
    return CreditUse(
        sequences=enqueued - trained - stepped - dead - dropped,
        max_sequences=held.get("max_in_flight") or None,
        bytes=number.get("bytes", 0) - number.get("stepped_bytes", 0),
        max_bytes=held.get("max_bytes"),
        ahead=enqueued - dead - dropped,
        max_ahead=max_ahead,
        group=held.get("group") or 1,
    )
