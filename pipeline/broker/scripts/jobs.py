"""Requests of the job queue; each script is documented in its file."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, cast

import msgspec

from sluice.pipeline.broker.scripts.library import IntRequest, Names, Request, WordRequest, WordsRequest, words
from sluice.pipeline.broker.scripts.streams import Refused

Outcome = Literal["enqueued", "duplicate", "done", "over_credit"]
"""duplicate: under way under this id; done: ended under this id a short while ago; over_credit: nothing was stored."""


class JobPrefixes(NamedTuple):
    """The first part of ARGV in every script of the queue: names.lua, in this order."""

    state_of: str
    progress_of: str
    results_of: str
    payload_of: str  # arq's own: job, result, in-progress
    answer_of: str
    running_of: str
    claims_of: str
    partitions: int
    keep_ms: int
    replies_of: str
    tag: str  # prefix of ids on a cluster, else ''
    prefix_of: str


class JobNames(Names, frozen=True, kw_only=True):
    """KEYS of every script of the queue: names.lua, in this order."""

    jobs: str
    alone: str
    counts: str
    dead: str
    dropped: str
    wake: str
    aborts: str
    latest: str
    source: str
    leases: str
    watch: str
    sweep: str
    evaluated: str
    producer: str  # its owner's key
    prefixes: JobPrefixes

    def keys(self) -> list[str]:
        """Without the prefixes."""
        return list(msgspec.structs.astuple(self)[:-1])

    def head(self) -> list[Any]:
        """The prefixes."""
        return list(self.prefixes)


class NewJob(NamedTuple):
    """A row of enqueue.lua."""

    id: str
    payload: bytes
    n: int
    priority: int
    defer_ms: int
    deadline_ms: int  # 0 = none
    cursor: str  # '' = none
    call: str  # '' = decode
    mailbox: str  # '' = none
    prefix: str = ""  # names of what its prompt begins with, the longest first; '' = none


class Enqueued(NamedTuple):
    """What enqueueing came to; nothing was done if it was refused."""

    outcomes: list[Outcome]
    refused: Refused | None = None


class Enqueue(Request[Enqueued], frozen=True, kw_only=True):
    """Admit jobs in order until the credit is used up."""

    script: ClassVar[str] = "enqueue"
    max_in_flight: int
    max_bytes: int
    samples_per_version: int
    max_staleness: int
    cursor_before: str  # '' = none
    nonce: str  # of the run's producer; '' = anybody may enqueue
    jobs: list[NewJob]

    def answer(self, raw: Any) -> Enqueued:
        """An outcome for each job, or a refusal."""
        return enqueued(raw)


def enqueued(raw: Any) -> Enqueued:
    """The answer of enqueue.lua and rollout_open.lua."""
    said = words(raw)
    refused = Refused.read(said)
    return Enqueued([], refused) if refused else Enqueued(cast("list[Outcome]", said))


class LeasedJob(NamedTuple):
    """A row of claim.lua's answer."""

    id: bytes  # may not be UTF-8
    payload: bytes
    attempt: int
    enqueued_ms: int
    left_ms: int | None  # to its deadline
    alone: bool
    committed: frozenset[int]
    progress: dict[int, bytes]
    foreign: bool  # its payload hasn't been read yet: settle.lua
    tries: int  # attempts that the function gave up itself

    @classmethod
    def of(cls, row: Any) -> LeasedJob:
        """From the script's table."""
        job_id, payload, attempt, enqueued_ms, left_ms, alone, done, stored, foreign, tries = row
        return cls(
            id=job_id,
            payload=payload,
            attempt=int(attempt),
            enqueued_ms=int(enqueued_ms),
            left_ms=None if left_ms == b"" else int(left_ms),
            alone=bool(alone),
            committed=frozenset(map(int, done.split(b","))) if done else frozenset(),
            progress={int(index): pieces for index, pieces in zip(stored[::2], stored[1::2], strict=True)},
            foreign=bool(foreign),
            tries=int(tries),
        )


class ClaimAnswer(NamedTuple):
    """Result of one claim."""

    jobs: list[LeasedJob]
    cancelled: list[str]
    more_are_ready: bool
    finish_what_you_hold_first: bool
    version: bytes  # the newest one; '' before the first
    over: int  # jobs that ended without starting
    again_ms: int  # until it must look again


class Claim(Request[ClaimAnswer], frozen=True, kw_only=True):
    """Lease ready jobs worth about `capacity` sequences."""

    script: ClassVar[str] = "claim"
    owner: str
    worker: str
    lease_ms: int
    capacity: int
    max_deaths: int
    held_jobs: int
    call_number: int  # a repeat of the last call gets the same jobs
    version: bytes  # the newest one the owner knows
    watch_ms: int  # 0: it doesn't look again by itself
    prefix_wait_ms: int  # how long a turn is left to the worker that has the turns before
    quota: int = 0  # sequences of this queue that all workers may hold at once; 0: any number
    looks: bool = False  # say without room too whether jobs are ready

    def answer(self, raw: Any) -> ClaimAnswer:
        jobs, cancelled, more, finish_first, version, over, again_ms = raw
        return ClaimAnswer(
            jobs=[LeasedJob.of(row) for row in jobs],
            cancelled=words(cancelled),
            more_are_ready=bool(more),
            finish_what_you_hold_first=bool(finish_first),
            version=version,
            over=int(over),
            again_ms=int(again_ms),
        )


class ReadJob(NamedTuple):
    """A row of settle.lua."""

    id: str
    attempt: int
    n: int
    call: str  # '' = decode
    enqueued_ms: int
    deadline_ms: int  # 0 = none
    mailbox: str  # '' = none
    priority: int


class Settle(WordsRequest, frozen=True, kw_only=True):
    """What a worker found in the payloads of foreign jobs: ok | expired (it is over) | fenced each."""

    script: ClassVar[str] = "settle"
    owner: str
    jobs: list[ReadJob]


class Ended(NamedTuple):
    """A row of commit.lua: one sequence, or with `kept_ms` arq's result of a plain call."""

    id: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] # the script's name for it
    attempt: int
    tokens: int
    result: bytes
    kept_ms: int | None  # None = a sequence; -1 = forever


class Commit(WordsRequest, frozen=True, kw_only=True):
    """Publish ended sequences and calls: ok | dup | fenced each."""

    script: ClassVar[str] = "commit"
    owner: str
    ended: list[Ended]


class StoredPiece(NamedTuple):
    """A row of checkpoint.lua."""

    id: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] # the script's name for it
    attempt: int
    offset: int
    tokens: int
    piece: bytes
    delta: bytes  # '' = none


class Checkpoint(WordsRequest, frozen=True, kw_only=True):
    """Store progress of running sequences: ok | dup | gap | fenced each."""

    script: ClassVar[str] = "checkpoint"
    owner: str
    pieces: list[StoredPiece]


class Attempt(NamedTuple):
    """A row of renew.lua and release.lua."""

    id: str
    attempt: int


class Release(IntRequest, frozen=True, kw_only=True):
    """Hand jobs back; returns how many the owner still held."""

    script: ClassVar[str] = "release"
    owner: str
    delay_ms: int
    blame: str  # reason; '' = nobody's fault
    traceback: str
    max_deaths: int
    tried: bool
    jobs: list[Attempt]


class Renew(WordsRequest, frozen=True, kw_only=True):
    """Extend leases; returns the ids of lost ones."""

    script: ClassVar[str] = "renew"
    owner: str
    lease_ms: int
    jobs: list[Attempt]


class Fail(IntRequest, frozen=True, kw_only=True):
    """End a job that can never succeed; returns how many sequences ended, -1 if the attempt doesn't hold it."""

    script: ClassVar[str] = "fail"
    owner: str
    worker: str
    id: str | bytes
    attempt: int
    ending: Literal["dead", "dropped"]
    reason: str
    detail: str
    traceback: str
    shown: str  # the id in readable form


class Abort(IntRequest, frozen=True, kw_only=True):
    """Request the end of jobs; returns how many were in progress."""

    script: ClassVar[str] = "abort"
    ids: list[str]


class Forget(Request[list[bytes]], frozen=True, kw_only=True):
    """Remove the replies of an ended job; returns what is taken out of the mailbox."""

    script: ClassVar[str] = "forget"
    id: str
    n: int
    mailbox: str  # '' = none

    def answer(self, raw: Any) -> list[bytes]:
        """In the order in which it arrived."""
        return raw


class StandDown(Request[None], frozen=True, kw_only=True):
    """A worker was told to end."""

    script: ClassVar[str] = "stand_down"
    owner: str
    leaving_ms: int  # 0: it holds nothing

    def answer(self, raw: Any) -> None:
        """No answer."""


class Reap(IntRequest, frozen=True, kw_only=True):
    """End a dead process's leases; returns how many jobs it held."""

    script: ClassVar[str] = "reap"
    owner: str
    max_deaths: int
    killed: bool


class Swept(NamedTuple):
    """`sequences` ended; `whole`: the sweep reached the end of the keys."""

    sequences: int
    whole: bool


class Sweep(Request[Swept], frozen=True, kw_only=True):
    """End jobs that a foreign worker removed from the queue."""

    script: ClassVar[str] = "sweep"
    every_ms: int
    keys_at_once: int
    pattern: str

    def answer(self, raw: Any) -> Swept:
        ended, whole = raw
        return Swept(int(ended), bool(whole))


class Unbury(WordRequest, frozen=True, kw_only=True):
    """Rows that leave the dead letters. ARGV of unbury.lua: their number, their entry ids, then those that stay."""

    leaving: list[str]
    staying: list[str]

    def args(self) -> list[Any]:
        """The rows last, regardless of which fields a request adds before them."""
        first = [getattr(self, name) for name in self.__struct_fields__ if name not in ("leaving", "staying")]
        return [*first, len(self.leaving), *self.leaving, *self.staying]


class Discard(Unbury, frozen=True, kw_only=True):
    """Delete dead letters of one job: ok | gone."""

    script: ClassVar[str] = "discard"


class Replay(Unbury, frozen=True, kw_only=True):
    """Requeue dead letters of one job as a new job: ok | gone | taken."""

    script: ClassVar[str] = "replay"
    id: bytes
    payload: bytes
    n: int
    priority: int
    deadline_ms: int  # 0 = none
    call: str  # '' = decode, '?' = the worker will determine it
    mailbox: str  # '' = none
