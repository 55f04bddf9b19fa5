"""What producers, foreign programs and workers do."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sluice.pipeline.queue import NO_LIMIT, Call, Piece, arq_payload
from sluice.pipeline.queue.envelope import call_payload
from sluice.pipeline.queue.queue import prefixes
from sluice.pipeline.wire.keys import ARQ_JOB
from sluice.pipeline.wire.messages import EVALUATION, DecodeJob, Progress
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import decode_job
from tests.property.queue_model.base import INDEX, ORDERS, OWNERS, Owner, QueueMachine
from tests.property.queue_model.foreign import KINDS, MAILBOX, foreign
from tests.property.queue_model.state import Job
from tests.property.queue_model.system import LEASE_S

OVERTAKEN = 10  # prefix.lua
NOW_MS = 1_800_000_000_000  # any; of the same length as today


def decoding(name: str, **changes: Any) -> DecodeJob:
    """A decode job; every third has a caller that is answered: a turn of one of two rollouts, or a long prompt."""
    number = int(name.removeprefix("m:j"))
    if number % 3 != 2:
        return decode_job(name, **changes)
    if number % 2:
        return decode_job(name, reply_to=MAILBOX, rollout_id=f"rollout {number % 4}", **changes)
    prompt = {"messages": [], "prompt_token_ids": TokenArray([7] * 520)} if number % 4 else {}
    return decode_job(name, reply_to=MAILBOX, **prompt, **changes)


class ProducerRules(QueueMachine):
    """Into the queue."""

    def submit(self, jobs: list[DecodeJob]) -> None:
        model = self.model
        held_bytes = self.system.snapshot().counts.get("bytes", 0)  # checked against what lies there after each step
        wanted = [self._as_model(job) for job in jobs]
        got = self.system.run(self.owners[0].queue.enqueue(jobs, self.credit))
        assert got == model.enqueue(wanted, self.credit, held_bytes)
        for job_id in {job.job_id for job, outcome in zip(wanted, got, strict=True) if outcome == "enqueued"}:
            model.jobs[job_id].payload = self.system.redis("GET", ARQ_JOB + job_id)  # says when it was enqueued

    def _as_model(self, job: DecodeJob) -> Job:
        home, payload = (-job.priority, self.model.stamp()), arq_payload(job, NOW_MS)
        has_end = job.deadline_s is not None
        its = tuple(prefixes(job))
        return Job(job.job_id, job.n, payload, home, mailbox=job.reply_to or "", prefixes=its, expires=has_end)

    @rule(orders=ORDERS, k=INDEX, again=st.booleans())
    def enqueue(self, orders: list[tuple[int, int, bool]], k: int, again: bool) -> None:
        """New jobs; with `again` the same call once more, and an older job among them."""
        jobs = [
            decoding(self.new_name(), n=n, priority=priority, deadline_s=3600.0 if deadline else None)
            for n, priority, deadline in orders
        ]
        if again and self.model.keeps:
            jobs.insert(k % len(jobs), decoding(self.pick(self.names, k)))
        self.submit(jobs)
        if again:
            self.submit([job for job in jobs if self.model.keeps or job.job_id in self.model.jobs])

    @rule(n=st.integers(1, 3), priority=st.sampled_from([0, 1000]))
    def enqueue_evaluation(self, n: int, priority: int) -> None:
        """What the evaluator asks for, whatever the credit."""
        job = decode_job(self.new_name(), n=n, priority=priority, reply_to=EVALUATION)
        wanted = [self._as_model(job)]
        assert self.system.run(self.owners[0].queue.enqueue([job], NO_LIMIT)) == ["enqueued"]
        assert self.model.enqueue(wanted, NO_LIMIT, 0) == ["enqueued"]
        wanted[0].payload = self.system.redis("GET", ARQ_JOB + job.job_id)

    @rule(priority=st.sampled_from([0, 0, 1]), deferred=st.booleans())
    def enqueue_call(self, priority: int, deferred: bool = False) -> None:
        name = self.new_name()
        call = Call(job_id=name, function="shrink", args=(1,), priority=priority, defer_s=3600.0 * deferred)
        got = self.system.run(self.owners[0].queue.enqueue_calls([call]))
        payload = self.system.redis("GET", ARQ_JOB + name)
        assert len(payload) == len(call_payload("shrink", (1,), {}, NOW_MS))
        job = Job(name, 1, payload, (-priority, self.model.stamp()), call="shrink", is_deferred=deferred)
        assert got == self.model.enqueue([job], type(self.credit)(0, 0, 0, 0), 0)

    @rule(kind=st.sampled_from(KINDS), n=st.integers(1, 3))
    def put_foreign(self, kind: str, n: int) -> None:
        name = self.new_name()
        made = foreign(kind, name, n)
        self.system.put_foreign(name, made.payload)
        self.reasons[name] = made.reason
        home = (0, self.model.stamp())
        job = Job(name, made.n, made.payload, home, made.call, made.mailbox, born_late=made.born_late)
        self.model.put_foreign(job, made.priority)

    @precondition(lambda self: self.model.jobs)
    @rule(k=st.integers(0, 15))
    def abort(self, k: int) -> None:
        """arq's Job.abort; every other time nothing, it ends too many jobs."""
        if job_id := self.pick(list(self.model.jobs) if k < 8 else [], k):
            job = self.model.jobs[job_id]
            if job.where in ("leased", "later", "apart", "apart_later"):
                self.system.hurry(job_id)
                self.model.jobs[job_id].hurried = True
            self.system.ask_abort(job_id)
            self.model.aborts.pop(job_id, None)  # a later one goes to the end
            self.model.aborts[job_id] = None

    @precondition(lambda self: self.live("leased", "later"))
    @rule(k=INDEX)
    def abort_cut_off(self, k: int) -> None:
        """The caller of Job.abort dies between its two steps."""
        if job_id := self.pick(self.live("leased", "later", "apart", "apart_later"), k):
            self.system.hurry(job_id)
            self.model.jobs[job_id].hurried = True

    @rule(k=INDEX)
    def abort_too_late(self, k: int) -> None:
        """The job ends between the question where it stands and the two steps."""
        if self.model.keeps and (job_id := self.pick(sorted(set(self.model.ended) - set(self.model.jobs)), k)):
            self.system.hurry(job_id)
            self.system.ask_abort(job_id)
            self.claim(self.owners[k % 3], 4)

    @precondition(lambda self: self.names)
    @rule()
    def new_version(self) -> None:
        self.model.latest += 1
        self.system.redis("SET", self.system.keys.latest, self.model.latest)


class WorkerRules(QueueMachine):
    """Out of it."""

    @rule(who=OWNERS, capacity=st.sampled_from([0, 1, 2, 3, 4, 4]), lost_answer=st.booleans())
    def claim_some(self, who: int, capacity: int, lost_answer: bool = False) -> None:
        self.claim(self.owners[who], capacity, lost_answer=lost_answer)

    @precondition(lambda self: self.model.jobs)
    @rule(who=OWNERS, index=st.integers(0, 2), mask=st.integers(0, 7))
    def work(self, who: int, index: int, mask: int) -> None:
        """A worker takes what there is, decodes a part of it and commits some."""
        owner = self.owners[who]
        self.claim(owner, 4)
        for k in range(sum(len(other.held) for other in self.owners)):
            if self._held(k)[0] is owner:
                self.checkpoint(k, index, "next", 1)
        for claim in list(owner.held.values()):
            if ended := self.endings(claim, mask):
                self.commit(owner, ended)

    @precondition(lambda self: any(owner.held for owner in self.owners))
    @rule(k=INDEX, mask=st.integers(0, 7), twice=st.booleans())
    def commit_one(self, k: int, mask: int, twice: bool) -> None:
        owner, job_id = self._held(k)
        ended = self.endings(owner.held[job_id], mask)
        for _ in range(1 + twice):
            self.commit(owner, ended)

    @precondition(lambda self: any(owner.held for owner in self.owners))
    @rule(who=OWNERS)
    def commit_all(self, who: int) -> None:
        owner = self.pick([owner for owner in self.owners if owner.held], who)
        self.commit(owner, [item for claim in owner.held.values() for item in self.endings(claim, 0)])

    @precondition(lambda self: any(owner.stale for owner in [*self.owners, *self.dead_owners]))
    @rule(who=st.integers(0, 9), k=INDEX, mask=st.integers(0, 7))
    def commit_late(self, who: int, k: int, mask: int) -> None:
        """A fenced attempt has no effect."""
        owner = self.pick([owner for owner in [*self.owners, *self.dead_owners] if owner.stale], who)
        if claim := self.pick(owner.stale, k):
            self.commit(owner, self.endings(claim, mask))

    @precondition(lambda self: any(owner.held for owner in self.owners))
    @rule(k=INDEX, index=st.integers(0, 2), how=st.sampled_from(["next", "next", "start", "gap", "dup"]), stale=INDEX)
    def checkpoint(self, k: int, index: int, how: str, stale: int) -> None:
        owner, job_id = self._held(k)
        claim = owner.held[job_id]
        if stale == 0 and owner.stale:
            claim = self.pick(owner.stale, k)
        if claim.job is None:
            return
        index %= claim.job.n
        job = self.model.jobs.get(claim.job_id)
        stored = len(job.progress.get(index, [])) if job else 0
        offset = {"next": stored, "start": 0, "gap": stored + 2, "dup": max(stored - 1, 0)}[how]
        tokens = [stored + 100, k]
        piece = Progress(
            offset=offset, token_ids=TokenArray(tokens), logprobs=FloatArray([-1.0, -2.0]), versions=Runs.of([0, 1])
        )
        args = (owner.queue.owner, claim.job_id, index, claim.attempt, offset, tokens)
        delta = f"delta {claim.job_id}:{index} {offset}".encode()
        got = self.system.run(owner.queue.checkpoint([Piece(claim, index, piece, delta)]))
        assert got == [self.model.checkpoint(*args)]

    @precondition(lambda self: any(owner.held for owner in self.owners))
    @rule(k=INDEX, everything=st.booleans(), later=st.booleans(), blame=st.sampled_from(["", "", "the engine failed"]))
    def release(self, k: int, everything: bool, later: bool, blame: str) -> None:
        """Hand back one job or all, and once more when the answer was lost."""
        owner, job_id = self._held(k)
        later = later and not blame
        chosen = [claim for name, claim in owner.held.items() if everything or name == job_id]
        for _ in range(2):
            held = {claim.job_id: claim.attempt for claim in chosen}
            call = owner.queue.release(chosen, 3600.0 * later, blame=blame, most=self.model.most)
            assert self.system.run(call) == self.model.release(owner.queue.owner, held, later=later, blame=bool(blame))
        for claim in chosen:
            owner.give_up(claim.job_id)

    @precondition(lambda self: any(owner.held for owner in self.owners))
    @rule(k=INDEX, ending=st.sampled_from(["dead", "dead", "dropped"]), stale=INDEX)
    def fail(self, k: int, ending: Literal["dead", "dropped"], stale: int) -> None:
        owner, job_id = self._held(k)
        claim = owner.held[job_id]
        if stale == 0 and owner.stale:
            claim = self.pick(owner.stale, k)
        reason = claim.reason or "invalid_request"
        expected = self.model.fail(owner.queue.owner, claim.job_id, claim.attempt, ending, reason)
        assert self.system.run(owner.queue.fail(claim, reason, "détail", "trace", ending)) == expected
        if claim.job_id == job_id:
            owner.give_up(job_id)

    @precondition(lambda self: any(owner.held for owner in self.owners))
    @rule(k=INDEX)
    def renew_all(self, k: int) -> None:
        """Held leases are extended; a late owner hears what it lost, and takes the blame for it back."""
        owner, _ = self._held(k)
        self.renew(owner, owner.attempts())

    @precondition(lambda self: any(owner.stale for owner in self.owners))
    @rule(who=OWNERS, k=INDEX)
    def renew_late(self, who: int, k: int) -> None:
        """The keeper's thread had asked before a job was given up."""
        owner = self.pick([owner for owner in self.owners if owner.stale], who)
        if (claim := self.pick(owner.stale, k)) and claim.job_id not in owner.held:
            self.renew(owner, {claim.job_id: claim.attempt})

    @rule(who=OWNERS, capacity=st.sampled_from([1, 2, 4, 4]), killed=st.sampled_from([False, False, True]))
    def die(self, who: int, capacity: int, killed: bool) -> None:
        """A worker takes what there is and dies over it, or is killed by its supervisor."""
        self.claim(self.owners[who], capacity)
        self.let_die(self.owners[who], killed=killed)

    @rule(who=OWNERS)
    def told_to_end(self, who: int) -> None:
        """A worker that was sent SIGTERM; what it holds may be lost yet."""
        queue = self.owners[who].queue
        self.system.run(queue.stand_down(LEASE_S))
        self.model.stand_down(queue.owner)

    @precondition(lambda self: any(owner.held for owner in self.owners))
    @rule(k=INDEX)
    def forget(self, k: int) -> None:
        """A worker stops holding a job and cannot say so."""
        owner, job_id = self._held(k)
        owner.give_up(job_id)

    def _held(self, k: int) -> tuple[Owner, str]:
        return self.pick([(owner, job_id) for owner in self.owners for job_id in owner.held], k)


class TimeRules(QueueMachine):
    """Time passes, and keys vanish."""

    @precondition(lambda self: self.live("leased"))
    @rule(k=INDEX)
    def lease_ends(self, k: int) -> None:
        self._end_lease(self.pick(self.live("leased"), k))

    @precondition(lambda self: self.live("leased"))
    @rule(who=OWNERS)
    def stall(self, who: int) -> None:
        """Every lease of one worker runs out."""
        nonce = self.owners[who].queue.owner
        for job_id in [name for name in self.live("leased") if self.model.jobs[name].owner == nonce]:
            self._end_lease(job_id)

    def _end_lease(self, job_id: str) -> None:
        job = self.model.jobs[job_id]
        self.system.lease_ends(job_id)
        job.where, job.hurried, job.due = "lapsed", False, (0, self.model.stamp())

    @precondition(lambda self: self.live("later", "apart_later"))
    @rule(k=INDEX)
    def delay_ends(self, k: int) -> None:
        job = self.model.jobs[self.pick(self.live("later", "apart_later"), k)]
        self.system.delay_ends(job.job_id, apart=job.where == "apart_later")
        if job.is_deferred:
            job.home, job.is_deferred = (job.home[0], self.model.stamp()), False
        job.due = job.home
        if job.where == "later":
            job.where, job.hurried = "ready", False
        else:
            job.where = "apart"

    @precondition(lambda self: any(job.expires and job.adopted and not job.late for job in self.model.jobs.values()))
    @rule(k=INDEX)
    def deadline_ends(self, k: int) -> None:
        if job_id := self.pick([name for name, job in self.model.jobs.items() if job.expires and job.adopted], k):
            self.system.deadline_ends(job_id)
            self.model.jobs[job_id].late = True

    @precondition(lambda self: self.live("ready"))
    @rule(k=INDEX, waited=st.sampled_from([1, 1, 2]))
    def has_waited(self, k: int, waited: int) -> None:
        """Its own worker didn't come for it, or others were taken first for long."""
        if job_id := self.pick([name for name in self.live("ready") if self.model.jobs[name].adopted], k):
            self._wait(job_id, waited)

    def _wait(self, job_id: str, waited: int) -> None:
        self.system.has_waited(job_id, {1: 2, 2: OVERTAKEN}[waited])
        self.model.jobs[job_id].waited = waited

    def give_turn_elsewhere(self) -> None:
        """A worker that is not here empties itself for suspects."""
        self.model.turns.add("elsewhere")
        self.system.redis("ZADD", f"{self.system.keys.alone}:turns", 4e12, "elsewhere")

    @precondition(lambda self: self.model.turns)
    @rule()
    def turn_ends(self) -> None:
        self.system.turn_ends()
        self.model.turns.clear()

    @precondition(lambda self: self.model.jobs)
    @rule(k=st.integers(0, 31))
    def lose_payload(self, k: int) -> None:
        """Seldom: it ends a job early."""
        if k > 7:
            return
        if job_id := self.pick(list(self.model.jobs), k):
            job = self.model.jobs[job_id]
            self.system.lose_payload(job_id)
            job.payload = None
