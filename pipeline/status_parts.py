"""The parts of a close look at a run (status_inspect.py fills them in); times are seconds by the server's clock."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeline.heartbeat import ALIVE_S, Heartbeat

_FULL = 0.99


class Depth(msgspec.Struct, kw_only=True):
    """Jobs in the queue; `seen_all` is false where leases and attempts are those of the first 1000 only."""

    ready: int = 0
    running: int = 0  # leased
    deferred: int = 0
    alone: int = 0  # set apart until a worker is empty
    oldest_s: float | None = None  # since the ready job that is next in the line was enqueued
    seen_all: bool = True


class Lease(msgspec.Struct, kw_only=True):
    """One job that a worker holds."""

    job_id: str
    worker: str
    attempt: int
    age_s: float  # since it was enqueued
    held_s: float | None  # since this attempt claimed it
    left_s: float  # until the lease ends, unless it is renewed
    sequences: int
    committed: int
    deaths: int  # workers that died over it
    alone: bool


class Lag(msgspec.Struct, kw_only=True):
    """One stream."""

    stream: str
    entries: int
    taken: int  # read by its owner, not acked
    oldest_s: float | None
    unread_s: float | None = None  # age of the oldest entry that its owner has not read


class CreditUse(msgspec.Struct, frozen=True, kw_only=True):
    """What unfinished sequences hold, dead letters included; the limits are those of the producer, once it ran."""

    sequences: int = 0
    max_sequences: int | None = None
    bytes: int = 0
    max_bytes: int | None = None
    ahead: int = 0  # sequences that were enqueued and are or will be trained
    max_ahead: int | None = None  # so many of them until the next version: (staleness + 1) versions' worth
    group: int = 1  # sequences that the next job takes

    @property
    def is_used_up(self) -> bool:
        """Whether the producer has to wait."""
        return bool(self.used_up)

    @property
    def used_up(self) -> list[Literal["sequences", "bytes", "versions"]]:
        """The limits that are reached."""
        found: list[Literal["sequences", "bytes", "versions"]] = []
        if self.max_sequences is not None and self.sequences + self.group > self.max_sequences:
            found.append("sequences")
        if self.max_bytes is not None and self.bytes >= self.max_bytes:
            found.append("bytes")
        if self.max_ahead is not None and self.ahead + self.group > self.max_ahead:
            found.append("versions")
        return found


class BrokerUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker says of itself."""

    used_bytes: int = 0
    max_bytes: int | None = None  # None: no limit of its own
    policy: str = "noeviction"  # any other one loses data when it is full
    aof: bool = False  # its data outlast a power loss
    version: str = ""
    refused: int = 0  # writes that it refused for lack of memory since it was started

    @property
    def is_full(self) -> bool:
        """Whether it refuses writes, or is about to."""
        return self.max_bytes is not None and self.used_bytes >= _FULL * self.max_bytes


StallKind = Literal[
    "no_process", "no_producer", "no_worker", "no_consumer", "no_trainer", "no_scorer", "no_gateway",
    "old_versions", "credit_exhausted", "trainer_dead", "consumer_lag", "broker_full", "guard_refused",
    "process_failed", "runs_alone", "unreadable",
]  # fmt: skip


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a run stands still, or goes slower than it could."""

    kind: StallKind
    says: str  # one plain sentence: what waits for what
    since: float | None = None  # Unix s, where it can be known
    remedy: str  # what to do
    blocks: bool = True  # False: it ends by itself as long as the rest of the run goes on


class Process(Heartbeat, kw_only=True):
    """One process's row, and how old it is."""

    age_s: float = 0.0
    waiting_s: float | None = None

    @property
    def is_onlooker(self) -> bool:
        """Whether the run goes on without it."""
        return self.role == "dashboard"

    @property
    def is_alive(self) -> bool:
        """Whether its heartbeat is fresh, and not its last one."""
        return self.ended_at is None and self.age_s < ALIVE_S
