"""Behind the queue: consumers, the trainer, and the end of everything."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sluice.pipeline.broker.scripts.streams import Read, StreamKeys
from sluice.pipeline.broker.streams import Entry, Ownership, ResultsLost, StreamReader, ack_batches, hand_off
from sluice.pipeline.errors import LeaseLost
from sluice.pipeline.wire.keys import BATCH_GROUP, RESULT_GROUP
from sluice.pipeline.wire.messages import DeadLetter, TrainingBatch, decode
from tests.factories import training_sample
from tests.property.queue_model.base import INDEX, QueueMachine
from tests.property.queue_model.state import Entry as Place
from tests.property.queue_model.system import PARTITIONS

PARTITION = st.integers(0, PARTITIONS - 1)


@dataclass
class Role:
    """A process that reads one stream."""

    owner: Ownership
    reader: StreamReader
    entries: list[Entry] = field(default_factory=list)  # held, in order
    taken: int = 0  # given out by the broker and not acked; more than `entries` when an answer was lost


class StreamRules(QueueMachine):
    """Consumers take results, the trainer takes batches."""

    def prepare_streams(self) -> None:
        self.number = 0
        self.waiting: list[str] = []  # ids of the batches in their stream, in order
        self.consumers = [self._role(f"consumer:{p}", f"{self.system.keys.results}{p}") for p in range(PARTITIONS)]
        self.trainer = self._role("trainer", self.system.keys.batches)

    def _role(self, name: str, stream: str) -> Role:
        self.number += 1
        owner = Ownership(self.system.client, self.system.keys, name)
        assert self.system.run(owner.try_acquire())
        group = BATCH_GROUP if name == "trainer" else RESULT_GROUP
        role = Role(owner, StreamReader(self.system.client, stream, group, f"r{self.number}", owner))
        role.entries = self.system.run(role.reader.open())
        role.taken = len(role.entries)
        return role

    def _read(self, role: Role, count: int, *, lost_answer: bool) -> list[Entry]:
        """The next entries; nothing is skipped when an answer gets lost on its way."""
        reader = role.reader
        if lost_answer and role.taken == len(role.entries):
            last = role.entries[-1].entry_id if role.entries else reader._last
            names = StreamKeys(stream=reader.stream, owner=role.owner.key)
            request = Read(nonce=role.owner.nonce, group=reader.group, reader=reader.name, count=count, last_seen=last)
            answer = self.system.run(self.system.scripts.ask(names, request))
            assert answer is not None
            role.taken += len(answer.rows)
        unseen = role.taken - len(role.entries)
        found = self.system.run(reader.read(count, 1))
        assert len(found) <= count
        if unseen:
            assert found, "what was given out with a lost answer is not read again"
        role.entries += found
        role.taken = max(role.taken, len(role.entries))
        return found

    @precondition(lambda self: any(self.model.results))
    @rule(p=PARTITION, count=st.integers(1, 4), lost_answer=st.booleans())
    def consume(self, p: int, count: int, lost_answer: bool) -> None:
        p = p if self.model.results[p] else 1 - p
        role, expected = self.consumers[p], self.model.results[p]
        before = len(role.entries)
        found = self._read(role, count, lost_answer=lost_answer)
        assert found or before == len(expected)
        places = [(entry.fields[b"g"].decode(), int(entry.fields[b"i"])) for entry in role.entries]
        assert places == [place[:2] for place in expected[: len(places)]]

    @precondition(lambda self: any(role.entries for role in self.consumers))
    @rule(p=PARTITION, k=INDEX, stale=st.booleans(), twice=st.booleans(), ghost=INDEX)
    def hand_on(self, p: int, k: int, stale: bool, twice: bool, ghost: int) -> None:
        """A batch out, or drops; once more when the answer was lost; not at all when one result is not there."""
        p = p if self.consumers[p].entries else 1 - p
        role = self.consumers[p]
        chosen = role.entries[: k + 1]
        if not chosen:
            return
        if ghost == 0:
            with pytest.raises(ResultsLost):
                self._hand_on(role, "ghost", chosen, stale, extra=["1-1"])
        self.number += 1
        batch_id = f"b{self.number}"
        assert self._hand_on(role, batch_id, chosen, stale) == "ok"
        self._handed_on(p, role, batch_id, chosen, stale)
        if twice:
            assert self._hand_on(role, batch_id, chosen, stale) == "dup"

    def _hand_on(
        self, role: Role, batch_id: str, chosen: list[Entry], stale: bool, extra: list[str] | None = None
    ) -> str:
        living = [_name(entry) for entry in chosen if b"r" in entry.fields]
        drops = [DeadLetter(seq_id=name, reason="stale", state="dropped") for name in living] if stale else []
        samples = [] if stale else [training_sample(name) for name in living]
        return self.system.run(
            hand_off(
                self.system.scripts,
                self.system.keys,
                reader=role.reader,
                owner_key=role.owner.key,
                nonce=role.owner.nonce,
                batch=TrainingBatch(batch_id=batch_id, samples=samples),
                result_ids=[entry.entry_id for entry in chosen] + (extra or []),
                result_bytes=sum(len(entry.fields.get(b"r") or entry.fields[b"d"]) for entry in chosen),
                drops=drops,
            )
        )

    def _handed_on(self, p: int, role: Role, batch_id: str, chosen: list[Entry], stale: bool) -> None:
        places = self.model.results[p][: len(chosen)]
        del self.model.results[p][: len(chosen)], role.entries[: len(chosen)]
        role.taken -= len(chosen)
        living = [place for place in places if not place.reason]
        if stale:
            self.model.dropped += [Place(place.job_id, place.index, place.n, "stale") for place in living]
            self.model.counts["dropped"] += len(living)
            self.model.counts["dropped:stale"] += len(living)
        elif living:
            self.model.counts["accepted"] += len(living)
            self.batched[batch_id] = len(living)
            self.waiting.append(batch_id)

    @precondition(lambda self: any(role.taken for role in self.consumers))
    @rule(p=PARTITION)
    def replace_a_consumer(self, p: int) -> None:
        self.replace_consumer(p)

    def replace_consumer(self, p: int) -> None:
        """Its successor takes over all that it held; the late one has no effect."""
        old = self.consumers[p]
        self.system.role_ends(f"consumer:{p}")
        role = self.consumers[p] = self._role(f"consumer:{p}", old.reader.stream)
        assert len(role.entries) == old.taken
        assert [entry.entry_id for entry in old.entries] == [
            entry.entry_id for entry in role.entries[: len(old.entries)]
        ]
        with pytest.raises(LeaseLost):
            self.system.run(old.reader.read(1, 1))
        if old.entries:
            with pytest.raises(LeaseLost):
                self._hand_on(old, "late", old.entries, stale=False)

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(1, 3), lost_answer=st.booleans())
    def read_batches(self, count: int, lost_answer: bool) -> None:
        self._read(self.trainer, count, lost_answer=lost_answer)
        ids = [decode(TrainingBatch, entry.fields[b"b"]).batch_id for entry in self.trainer.entries]
        assert ids == self.waiting[: len(ids)]

    @precondition(lambda self: any(self.model.results))
    @rule(p=PARTITION, k=INDEX)
    def deliver(self, p: int, k: int) -> None:
        """Some results on their way to the end."""
        self.consume(p, k + 1, False)
        if self.consumers[p].entries:
            self.hand_on(p, k, False, False, 1)
        if self.waiting:
            self.read_batches(k + 1, False)
            self.ack(k, False)

    @precondition(lambda self: self.trainer.entries)
    @rule(k=INDEX, twice=st.booleans())
    def ack(self, k: int, twice: bool) -> None:
        """The checkpoint is durable: each batch counts once."""
        role = self.trainer
        chosen = role.entries[: k + 1]
        acked = [
            (entry.entry_id, self.batched.pop(batch_id)) for entry, batch_id in zip(chosen, self.waiting, strict=False)
        ]
        trained = sum(samples for _, samples in acked)
        for expected in (trained, 0)[: 1 + twice]:
            call = ack_batches(self.system.scripts, self.system.keys, role.owner.key, role.owner.nonce, acked)
            assert self.system.run(call) == expected
        role.reader.release([entry_id for entry_id, _ in acked])
        self.model.counts["trained"] += trained
        del role.entries[: len(chosen)], self.waiting[: len(chosen)]
        role.taken -= len(chosen)

    @precondition(lambda self: self.trainer.taken)
    @rule()
    def replace_a_trainer(self) -> None:
        self.replace_trainer()

    def replace_trainer(self) -> None:
        old = self.trainer
        self.system.role_ends("trainer")
        self.trainer = self._role("trainer", old.reader.stream)
        assert len(self.trainer.entries) == old.taken
        late = [(entry.entry_id, 1) for entry in old.entries]
        call = ack_batches(self.system.scripts, self.system.keys, old.owner.key, old.owner.nonce, late)
        with pytest.raises(LeaseLost):
            self.system.run(call)


def _name(entry: Entry) -> str:
    return f"{entry.fields[b'g'].decode()}:{int(entry.fields[b'i'])}"
