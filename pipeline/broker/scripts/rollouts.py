"""Requests of agent rollouts; each script is documented in its file."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, cast

import msgspec

from sluice.pipeline.broker.scripts.jobs import Enqueued, enqueued
from sluice.pipeline.broker.scripts.library import IntRequest, Names, Request, WordRequest

Added = Literal["ok", "dup", "closed", "changed", "unknown"]


class RolloutNames(Names, frozen=True, kw_only=True):
    """KEYS of every script of rollouts, then the first part of ARGV: rollout_names.lua, in this order."""

    counts: str
    dropped: str
    source: str
    open: str
    evaluated: str
    open_evaluated: str
    producer: str  # its owner's key
    rollout_of: str
    ttl_ms: int
    keep_ms: int

    def keys(self) -> list[str]:
        """The first seven."""
        return list(msgspec.structs.astuple(self)[:7])

    def head(self) -> list[Any]:
        """The others."""
        return list(msgspec.structs.astuple(self)[7:])


class NewRollout(NamedTuple):
    """A row of rollout_open.lua."""

    id: str
    head: bytes
    stream: str
    group: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] # the script's name for it
    size: int
    cursor: str  # '' = none
    evaluated: str  # '' = no: it is trained on


class Open(Request[Enqueued], frozen=True, kw_only=True):
    """Open rollouts in order until the credit is used up."""

    script: ClassVar[str] = "rollout_open"
    max_in_flight: int
    max_bytes: int
    samples_per_version: int
    max_staleness: int
    cursor_before: str  # '' = none
    nonce: str  # of the run's producer; '' = anybody may open
    rollouts: list[NewRollout]

    def answer(self, raw: Any) -> Enqueued:
        """Like enqueue.lua's."""
        return enqueued(raw)


class AddedTurn(NamedTuple):
    """`place`: the turn's number, -1 if there is no open rollout."""

    word: Added
    place: int


class Add(Request[AddedTurn], frozen=True, kw_only=True):
    """Add a turn to an open rollout; each key counts once. `changed`: its parent isn't the turn of that mark."""

    script: ClassVar[str] = "rollout_add"
    id: str
    key: str
    turn: bytes
    mark: str
    parent: int
    parent_mark: str

    def answer(self, raw: Any) -> AddedTurn:
        word, place = raw
        return AddedTurn(cast(Added, word.decode()), int(place))


class PublishRollout(WordRequest, frozen=True, kw_only=True):
    """Publish its trajectories as results: ok | closed | unknown | changed."""

    script: ClassVar[str] = "rollout_publish"
    id: str
    turns: int
    results: list[bytes]


class DropRollout(WordRequest, frozen=True, kw_only=True):
    """End a rollout with nothing to train on: ok | closed | unknown."""

    script: ClassVar[str] = "rollout_drop"
    id: str
    reason: str
    detail: str


class SweepRollouts(IntRequest, frozen=True, kw_only=True):
    """Drop rollouts that nobody has called for too long; returns how many."""

    script: ClassVar[str] = "rollout_sweep"
    most: int
    detail: str
