"""The parts of a close look at a run (status_inspect.py fills them in); times are seconds by the server's clock."""

from __future__ import annotations

import msgspec

from pipeline.heartbeat import ALIVE_S, Heartbeat


class Depth(msgspec.Struct, kw_only=True):
    """Jobs in the queue. Above `seen_all` false, running and deferred are told apart among the first 1000 only."""

    ready: int = 0
    running: int = 0  # leased
    deferred: int = 0
    alone: int = 0  # set apart until a worker is empty
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


class CreditUse(msgspec.Struct, frozen=True, kw_only=True):
    """What unfinished sequences hold, dead letters included; the limits are those of the producer, once it ran."""

    sequences: int = 0
    max_sequences: int | None = None
    bytes: int = 0
    max_bytes: int | None = None

    @property
    def is_used_up(self) -> bool:
        """Whether the producer has to wait."""
        full = self.max_sequences is not None and self.sequences >= self.max_sequences
        return full or (self.max_bytes is not None and self.bytes >= self.max_bytes)


class Process(Heartbeat, kw_only=True):
    """One process's row, and how old it is."""

    age_s: float = 0.0
    waiting_s: float | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its heartbeat is fresh."""
        return self.age_s < ALIVE_S
