"""The whole machine: every rule, and what must be left when all has ended."""

from __future__ import annotations

import pytest

from sluice.pipeline.config.types import Config
from sluice.pipeline.queue.dead_letters import DeadLetters, Selection
from sluice.pipeline.wire.keys import ARQ_ABORT, ARQ_RESULT
from tests.property.queue_model.rules import ProducerRules, TimeRules, WorkerRules
from tests.property.queue_model.streams import StreamRules

MOST_ROUNDS = 60


class Machine(ProducerRules, WorkerRules, TimeRules, StreamRules):
    """The queue from enqueue to the trainer's ack."""

    failed = False

    def check_invariants(self, *args: object, **kwargs: object) -> None:
        try:
            super().check_invariants(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self.failed = True
            raise

    def teardown(self) -> None:
        if not hasattr(self, "system"):
            return
        try:
            if not self.failed:
                self.end_all()
        finally:
            super().teardown()

    def end_all(self) -> None:
        """Run everything to its end: nothing is left but tombstones, and the broker holds no byte of it."""
        for _ in range(MOST_ROUNDS):
            if not self.model.jobs:
                break
            self._end_some()
            self.agrees()
        else:
            pytest.fail(f"jobs do not end: {self.model.jobs}")
        self._deliver_all()
        letters = DeadLetters(self.system.client, Config(run=self.system.keys.run))
        done = self.system.run(letters.drop(Selection(everything=True)))
        assert not [job.problem for job in done if job.problem]
        self.model.dead.clear()
        self.agrees()
        self._nothing_is_left()

    def _end_some(self) -> None:
        for job_id in self.live("leased"):
            self._end_lease(job_id)
        for _ in self.live("later", "apart_later"):
            self.delay_ends(0)
        for job_id in [name for name in self.live("ready") if self.model.jobs[name].prefixes]:
            self._wait(job_id, 1)  # or it is left to a worker that had room
        self.turn_ends()
        for owner in self.owners:
            owner.held.clear()
        last = self.owners[0] = self.new_owner()
        self.claim(last, 100)
        for claim in list(last.held.values()):
            if ended := self.endings(claim, 0):
                self.commit(last, ended)
            else:
                self.model.fail(last.queue.owner, claim.job_id, claim.attempt, "dead", claim.reason)
                assert self.system.run(last.queue.fail(claim, claim.reason, claim.problem)) > 0

    def _deliver_all(self) -> None:
        for p in range(len(self.consumers)):
            self.replace_consumer(p)
            if self.model.results[p]:
                self.consume(p, 1000, False)
                self.hand_on(p, 1000, False, False, 1)
            assert not self.model.results[p]
        self.replace_trainer()
        if self.waiting:
            self.read_batches(1000, False)
            self.ack(1000, False)
        assert not self.waiting

    def _nothing_is_left(self) -> None:
        found, keys = self.system.snapshot(), self.system.keys
        assert found.counts.get("bytes", 0) == 0
        assert sum(found.counts.get(name, 0) for name in ("trained", "dead", "dropped")) == found.counts.get(
            "enqueued", 0
        )
        self.claim(self.owners[0], 1)  # also forgets aborts of jobs that ended before
        if self.model.keeps:
            assert not self.system.redis("ZCARD", ARQ_ABORT)
        self.turn_ends()
        left = {
            name
            for name in self.system.snapshot().keys
            if not name.startswith((ARQ_RESULT, keys.owner, keys.claim, keys.replies, keys.prefixes, f"{keys.wake}:"))
        }
        streams = {role.reader.stream for role in (*self.consumers, self.trainer)} | {keys.dead, keys.dropped}
        assert found.counts.get("evaluating", 0) == 0
        assert left <= streams | {keys.evaluated, keys.counts, keys.latest, keys.wake, keys.source}
        for stream in streams - {keys.dropped}:
            assert not self.system.redis("XLEN", stream)
