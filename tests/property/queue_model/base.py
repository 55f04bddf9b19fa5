"""The machine's parts: the model beside the real queue, and the owners that use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.queue import Called, Claim, Credit, Finished, JobQueue, arq_serializer
from tests.factories import sequence_result
from tests.property.queue_model.checks import check_model, check_once, check_places, check_sums
from tests.property.queue_model.model import QueueModel
from tests.property.queue_model.system import LEASE_S, PARTITIONS, PREFIX_WAIT_S, System

OWNERS = st.integers(0, 2)
INDEX = st.integers(0, 7)
ORDER = st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 0, 1, 1000]), st.booleans())  # n, priority, deadline
ORDERS = st.lists(ORDER, min_size=1, max_size=4)


@dataclass
class Owner:
    """A worker process, and what it believes that it holds."""

    queue: JobQueue
    held: dict[str, Claim] = field(default_factory=dict)
    stale: list[Claim] = field(default_factory=list)  # attempts that it has lost or given up

    def attempts(self) -> dict[str, int]:
        return {job_id: claim.attempt for job_id, claim in self.held.items()}

    def give_up(self, job_id: str) -> None:
        """Holds it no more."""
        if job_id in self.held:
            self.stale.append(self.held.pop(job_id))


class QueueMachine(RuleBasedStateMachine):
    """Does everything twice: in the model and in the broker."""

    config: BrokerConfig

    @initialize(
        orders=ORDERS,
        max_in_flight=st.integers(2, 12),
        per_version=st.integers(3, 8),
        staleness=st.integers(0, 2),
        max_bytes=st.sampled_from([700, 2500, 1 << 20]),
        most=st.integers(1, 3),
        keeps=st.booleans(),
    )
    def begin(
        self,
        max_in_flight: int,
        per_version: int,
        staleness: int,
        max_bytes: int,
        most: int,
        keeps: bool,
        orders: list[tuple[int, int, bool]],
    ) -> None:
        self.credit = Credit(max_in_flight, per_version, staleness, max_bytes)
        self.system = System(self.config, LEASE_S if keeps else 0)
        self.model = QueueModel(PARTITIONS, keeps, most)
        self.owners = [self.new_owner() for _ in range(3)]
        self.dead_owners: list[Owner] = []
        self.names: list[str] = []  # every job id so far
        self.reasons: dict[str, str] = {}  # foreign job id → reason of its dead letter
        self.seen: dict[str, str] = {}
        self.batched: dict[str, int] = {}  # batch entry id → samples
        self.prepare_streams()
        self.enqueue(orders, 0, False)

    def enqueue(self, orders: list[tuple[int, int, bool]], k: int, again: bool) -> None:
        """Of the rules for producers."""

    def prepare_streams(self) -> None:
        """Of the rules for consumers and the trainer."""

    def teardown(self) -> None:
        if hasattr(self, "system"):
            self.system.close()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "system"):
            return
        found = self.system.snapshot()
        check_sums(found, sum(self.batched.values()))
        ours = {job_id for job_id, job in self.model.jobs.items() if job.adopted and job.payload is not None}
        check_places(found, self.system.keys, ours)
        check_once(found, self.seen)
        check_model(found, self.model, self.system.keys)

    # Helpers.

    def new_owner(self) -> Owner:
        return Owner(self.system.queue("w"))

    def new_name(self) -> str:
        self.names.append(f"m:j{len(self.names)}")
        return self.names[-1]

    def pick(self, names: list[Any], k: int) -> Any:
        """One of them; None of none."""
        return names[k % len(names)] if names else None

    def live(self, *where: str) -> list[str]:
        """Unfinished jobs in one of these places, oldest first."""
        return [job_id for job_id, job in self.model.jobs.items() if job.where in where]

    def claim(self, owner: Owner, capacity: int, *, lost_answer: bool = False) -> None:
        """Claim, and compare what is given; once more when the answer was lost."""
        queue, model = owner.queue, self.model
        if any(claim.alone for claim in owner.held.values()):
            capacity = 0
        if lost_answer:
            self.system.run(queue.claim(capacity, LEASE_S, model.most, len(owner.held), prefix_wait_s=PREFIX_WAIT_S))
            model.claim(queue.owner, capacity, len(owner.held), queue._num_claims)
            queue._num_claims -= 1
        got = self.system.run(queue.claim(capacity, LEASE_S, model.most, len(owner.held), prefix_wait_s=PREFIX_WAIT_S))
        expected = model.claim(queue.owner, capacity, len(owner.held), queue._num_claims)
        assert [(claim.job_id, claim.attempt, claim.alone, claim.committed) for claim in got.claims] == [
            (given.job_id, given.attempt, given.alone, given.done) for given in expected.given
        ]
        stored = [{i: list(p.token_ids) for i, p in claim.progress.items()} for claim in got.claims]
        assert stored == [given.progress for given in expected.given]
        assert got.cancelled == expected.cancelled
        assert (got.more, got.must_drain) == (expected.more, expected.must_drain)
        assert (got.latest or 0) == model.latest
        if any(claim.alone for claim in got.claims):
            assert all(claim.alone for claim in got.claims)
            assert not owner.held, "suspects were given to a busy worker"
        for job_id in got.cancelled:
            owner.give_up(job_id)
        for claim in got.claims:
            owner.give_up(claim.job_id)
            owner.held[claim.job_id] = claim
            assert claim.reason == self.reasons.get(claim.job_id, "")

    def endings(self, claim: Claim, mask: int) -> list[Finished | Called]:
        """What a worker would commit: the chosen indices, those that are committed included."""
        if claim.problem:
            return []
        if claim.job is None:
            return [Called(claim, arq_serializer({"t": claim.attempt, "f": claim.function, "s": True, "r": None}))]
        n = claim.job.n
        chosen = [index for index in range(n) if mask >> index & 1] or list(range(n))
        return [Finished(claim, sequence_result(claim.job_id, index, n, text="x" * 40 * index)) for index in chosen]

    def commit(self, owner: Owner, ended: list[Finished | Called]) -> None:
        """Commit, and compare."""
        expected: list[str] = []
        for item in ended:
            finished = isinstance(item, Finished)
            index, tokens = (item.result.index, len(item.result.token_ids)) if finished else (0, -1)
            claim = item.claim
            expected.append(self.model.commit(owner.queue.owner, claim.job_id, index, claim.attempt, tokens))
        assert self.system.run(owner.queue.commit(ended)) == expected
        for item in ended:
            if not self.model.holds(owner.queue.owner, item.claim.job_id, item.claim.attempt):
                owner.give_up(item.claim.job_id)

    def renew(self, owner: Owner, held: dict[str, int]) -> None:
        """Renew, as the keeper's thread does, and compare."""
        lost = self.system.run(owner.queue.renew(LEASE_S, held))
        assert lost == self.model.renew(owner.queue.owner, held)
        for job_id in lost:
            owner.give_up(job_id)

    def let_die(self, owner: Owner, *, killed: bool = False) -> Owner:
        """The process is dead and its supervisor says so; another takes its place."""
        got = self.system.run(self.owners[0].queue.reap(owner.queue.owner, self.model.most, killed=killed))
        assert got == self.model.reap(owner.queue.owner, killed=killed)
        owner.stale += owner.held.values()
        owner.held.clear()
        self.dead_owners.append(owner)
        fresh = self.new_owner()
        self.owners[self.owners.index(owner)] = fresh
        return fresh
