"""Requests for what one process holds at a time: roles, source, streams, weight versions; and for the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast

from sluice.pipeline.broker.scripts.library import IntRequest, Names, Request, WordRequest, words


class RoleKey(Names, frozen=True, kw_only=True):
    """KEYS of own.lua and disown.lua."""

    owner: str


class Own(IntRequest, frozen=True, kw_only=True):
    """Take or renew a role; 1 if we hold it."""

    script: ClassVar[str] = "own"
    nonce: str
    ttl_ms: int
    renew: bool  # we held it before


class Disown(IntRequest, frozen=True, kw_only=True):
    """Give a role back."""

    script: ClassVar[str] = "disown"
    nonce: str


class Refused(NamedTuple):
    """fenced: another process has the producer's role; rewound: the source must be read again from after `cursor`."""

    word: Literal["fenced", "rewound"]
    cursor: str = ""

    @classmethod
    def read(cls, said: Sequence[str]) -> Refused | None:
        """None if these words are no refusal."""
        return cls(*cast("Any", said)) if said and said[0] in ("fenced", "rewound") else None


class SourceKeys(Names, frozen=True, kw_only=True):
    """KEYS of source_set.lua."""

    source: str
    owner: str


class SourceField(NamedTuple):
    """A row of source_set.lua."""

    name: str
    value: str | bytes | int


class SetSource(Request["Refused | None"], frozen=True, kw_only=True):
    """Store what the producer knows of its source; None when it was stored."""

    script: ClassVar[str] = "source_set"
    nonce: str
    cursor_before: str  # '' = none
    fields: list[SourceField]

    def answer(self, raw: Any) -> Refused | None:
        return Refused.read(words(raw))


class StreamKeys(Names, frozen=True, kw_only=True):
    """KEYS of read.lua; without an owner, nothing is fenced."""

    stream: str
    owner: str | None

    def keys(self) -> list[str]:
        """Includes the owner if there is one."""
        return [self.stream] if self.owner is None else [self.stream, self.owner]


class Entries(NamedTuple):
    """`rows`: entry ids and their fields; `pending`: how many entries the group's readers now hold."""

    rows: list[tuple[bytes, dict[bytes, bytes]]]
    pending: int


class Read(Request["Entries | None"], frozen=True, kw_only=True):
    """The next entries of a stream; None when another reader took over."""

    script: ClassVar[str] = "read"
    nonce: str
    group: str
    reader: str
    count: int
    last_seen: str

    def answer(self, raw: Any) -> Entries | None:
        if raw == -1:
            return None
        rows, pending = raw
        return Entries([(entry, dict(zip(flat[::2], flat[1::2], strict=True))) for entry, flat in rows], int(pending))


class Drop(NamedTuple):
    """A dropped sequence: its reason, and its letter encoded."""

    reason: str
    letter: bytes


class HandoffKeys(Names, frozen=True, kw_only=True):
    """KEYS of handoff.lua."""

    results: str
    batches: str
    counts: str
    owner: str
    dropped: str


class Handoff(WordRequest, frozen=True, kw_only=True):
    """A consumer's effect, whole or not at all: ok | dup | fenced | lost."""

    script: ClassVar[str] = "handoff"
    nonce: str
    group: str
    reader: str
    batch_id: str
    batch: bytes
    samples: int
    result_bytes: int
    result_ids: list[str]
    drops: list[Drop]

    def args(self) -> list[Any]:
        """Both counts come before the rows."""
        head = [self.nonce, self.group, self.reader, self.batch_id, self.batch, self.samples, self.result_bytes]
        rows = [part for drop in self.drops for part in drop]
        return [*head, len(self.result_ids), len(self.drops), *self.result_ids, *rows]


class AckKeys(Names, frozen=True, kw_only=True):
    """KEYS of ack.lua."""

    batches: str
    counts: str
    owner: str
    dropped: str


class AckedBatch(NamedTuple):
    """One batch, and the samples the trainer dropped from it."""

    stream_id: str
    samples: int
    drops: list[Drop]


class Stepped(NamedTuple):
    """What is part of a step, and isn't acked because no checkpoint holds that step yet; it takes up no credit."""

    samples: int = 0
    bytes: int = 0


class Ack(IntRequest, frozen=True, kw_only=True):
    """The trainer's ack; returns the samples counted as trained, -1 if another trainer took over.

    `stepped`: what stays in steps without an ack afterwards.
    """

    script: ClassVar[str] = "ack"
    nonce: str
    group: str
    stepped: Stepped
    batches: list[AckedBatch]

    def args(self) -> list[Any]:
        """Each batch is followed by its drops."""
        found: list[Any] = [self.nonce, self.group, *self.stepped]
        for batch in self.batches:
            found += [batch.stream_id, batch.samples, len(batch.drops)]
            found += [part for drop in batch.drops for part in drop]
        return found


class PublishKeys(Names, frozen=True, kw_only=True):
    """KEYS of publish.lua."""

    versions: str
    latest: str
    owner: str


class Publish(WordRequest, frozen=True, kw_only=True):
    """Register a weight version: ok | fenced | conflict."""

    script: ClassVar[str] = "publish"
    nonce: str
    version: int
    digest: str
    manifest: bytes
    serves: bool = True  # workers load it
    forgotten: list[int] = []  # versions that are gone


class AgreeKeys(Names, frozen=True, kw_only=True):
    """KEYS of agree.lua."""

    contract: str
    processes: str
    rollouts: str


class Agreed(NamedTuple):
    """differs: `alive` participate under the contract `theirs`; unread: `count` of `what` would be left behind.

    stale: `alive` were last heard from too long ago; `seen` is what was last heard of them.
    """

    word: Literal["ok", "differs", "stale", "unread"]
    theirs: str = ""
    alive: list[str] = []
    seen: bytes = b""
    what: str = ""
    count: int = 0  # pyright: ignore[reportIncompatibleMethodOverride] # the script's name for it


class Agree(Request[Agreed], frozen=True, kw_only=True):
    """Join a run."""

    script: ClassVar[str] = "agree"
    contract: bytes
    name: str
    row: bytes
    alive_ms: int
    results_of: str
    onlookers: str  # roles, comma-separated
    still: bytes  # `seen` some heartbeats ago: anyone unchanged since then counts as dead

    def answer(self, raw: Any) -> Agreed:
        word = cast("Literal['ok', 'differs', 'stale', 'unread']", raw[0].decode())
        if word == "ok":
            return Agreed(word)
        theirs = raw[1].decode(errors="replace")
        if word == "differs":
            return Agreed(word, theirs, alive=words(raw[2:]))
        if word == "stale":
            return Agreed(word, theirs, words([row.rpartition(b" ")[0] for row in raw[2].split(b"\n")]), raw[2])
        what, count = raw[2:]
        return Agreed(word, theirs, what=what.decode(), count=int(count))
