"""The queue said once more, in plain Python: what the scripts must do, without Redis, leases in time, or bytes."""

from __future__ import annotations

import math
from typing import Literal

from sluice.pipeline.queue import Credit
from tests.property.queue_model.endings import Endings
from tests.property.queue_model.state import Answer, Entry, Given, Job

SHARED_DEATHS, MOST_TOGETHER = 2, 32


class QueueModel(Endings):
    """All that the broker holds of one run."""

    # Enqueue.

    def enqueue(self, jobs: list[Job], credit: Credit, held_bytes: int) -> list[str]:
        """Outcomes; the jobs are new ones, of which only those that are admitted are kept."""
        found: list[str] = []
        for job in jobs:
            outcome = "over_credit" if "over_credit" in found else self._known(job.job_id)
            if not outcome and credit.max_in_flight and self._is_over(job, credit, held_bytes):
                outcome = "over_credit"
            if not outcome:
                assert job.payload is not None
                outcome = "enqueued"
                job.due, job.where = job.home, "later" if job.is_deferred else "ready"
                self.jobs[job.job_id] = job
                if job.is_evaluated:
                    self.counts["evaluating"] += 1
                else:
                    held_bytes += len(job.payload)
                    self.counts["enqueued"] += job.n
            found.append(outcome)
        return found

    def _known(self, job_id: str) -> str:
        return "done" if self.keeps and job_id in self.ended else "duplicate" if job_id in self.jobs else ""

    def _is_over(self, job: Job, credit: Credit, held_bytes: int) -> bool:
        count = self.counts
        assert job.payload is not None
        lost = count["dead"] + count["dropped"]
        used = count["enqueued"] - lost
        flying = used - count["trained"]
        ahead = (credit.max_staleness + 1) * credit.samples_per_version
        ahead += count["trained"]
        too_big = flying + job.n > credit.max_in_flight or held_bytes + len(job.payload) > credit.max_bytes
        return used + job.n > ahead or (flying > 0 and too_big)

    def put_foreign(self, job: Job, priority: int) -> None:
        """arq's own enqueue_job: nothing is counted yet."""
        job.real = (job.n, job.call, job.mailbox, priority)
        job.mailbox = ""
        job.n, job.call, job.adopted, job.due = 1, "?", False, job.home
        self.jobs[job.job_id] = job

    def _adopt(self, job: Job) -> None:
        if not job.adopted:
            job.adopted = True
            self.counts["enqueued"] += job.n

    # Claim.

    def claim(self, owner: str, capacity: int, held: int, number: int) -> Answer:
        """What `owner` is given; a repeat of its last call is given the same."""
        cancelled = self._cancel(owner)
        last, ids = self.last.get(owner, (0, []))
        if capacity <= 0:
            self.with_room.discard(owner)
        if last == number:
            again = [
                self._given(self.jobs[name]) for name in ids if name in self.jobs and self.jobs[name].owner == owner
            ]
            return Answer(
                [item for item in again if self.jobs[item.job_id].payload is not None], cancelled, False, False
            )
        lapsed = sorted((job for job in self.jobs.values() if job.where == "lapsed"), key=lambda job: job.due)
        held_by = {job.owner: self._num_held(job.owner) for job in lapsed}
        for job in lapsed:
            self._expire(job, owner, held_by[job.owner])
        line = sorted((job for job in self.jobs.values() if job.where == "apart"), key=lambda job: job.due)
        if line:
            self.with_room.discard(owner)
        if line and held:
            if owner in self.turns or len(self.turns) < math.ceil(len(line) / line[0].alone):
                self.turns.add(owner)
                return Answer([], cancelled, False, True)
        elif line and capacity > 0:
            self.turns.discard(owner)
            suspects = self._suspects(line, capacity)
            for job in suspects:
                job.together = len(suspects)
            taken = [item for job in suspects for item in self._take(job, owner)]
            return Answer(self._settle(owner, number, taken), cancelled, False, False)
        if capacity <= 0:
            return Answer([], cancelled, False, False)
        given, more = self._take_ready(owner, capacity)
        return Answer(self._settle(owner, number, given), cancelled, more, False)

    def _take_ready(self, owner: str, capacity: int) -> tuple[list[Given], bool]:
        """What it takes of the line, and whether it leaves some for want of room."""
        given: list[Given] = []
        limit, more = capacity, False
        ready = [job for job in self.jobs.values() if job.where == "ready" or job.hurried]
        for seen, job in enumerate(self._by_prefix(sorted(ready, key=lambda job: job.place), owner)):
            if capacity <= 0 or seen >= limit:
                more = True
                break
            if self._is_free(job):
                taken = self._take(job, owner)
                capacity -= job.n - len(job.done) if taken else 0
                given += taken
        if capacity > 0 and owner in self.has_prefixes:
            self.with_room.add(owner)
        else:
            self.with_room.discard(owner)
        return given, more

    def _by_prefix(self, line: list[Job], owner: str) -> list[Job]:
        """The order in which this worker takes them, without what is left to others that have room."""
        has = owner in self.has_prefixes

        def kind(job: Job) -> int:
            if has and job.waited == 2:
                return 0
            return 1 if has and self._holder(job) == owner else 2

        return sorted(
            (job for job in line if not self._is_left(job, owner)),
            key=lambda job: (job.place[0], kind(job), job.place),
        )

    def _is_left(self, job: Job, owner: str) -> bool:
        """Whether another worker has the rollout's earlier turns, and room."""
        holder = self._holder(job)
        if not holder or holder == owner or job.waited or not job.prefixes[0].startswith("r:"):
            return False
        return holder in self.with_room

    def _holder(self, job: Job) -> str:
        """The worker that has the longest known beginning of its prompt."""
        return next((self.prefixes[name] for name in job.prefixes if name in self.prefixes), "")

    def _suspects(self, line: list[Job], capacity: int) -> list[Job]:
        """Those that one empty worker is given."""
        chosen: list[Job] = []
        for job in line:
            room = capacity - sum(one.n - len(one.done) for one in chosen)
            if job.alone >= line[0].alone > len(chosen) and room > 0:
                chosen.append(job)
        return chosen

    def _num_held(self, owner: str) -> int:
        return sum(job.owner == owner for job in self.jobs.values())

    def _settle(self, owner: str, number: int, given: list[Given]) -> list[Given]:
        """The call is remembered; the worker reads the payloads of foreign jobs and says what they are."""
        self.last.pop(owner, None)
        if given:
            self.last[owner] = number, [item.job_id for item in given]
        for job in (self.jobs[item.job_id] for item in given):
            if job.real is None:
                continue
            (job.n, job.call, job.mailbox, priority), job.real = job.real, None
            job.home = (-priority, job.home[1])
            self.counts["enqueued"] += job.n - 1
            if job.born_late:
                self.bury(job, "dead", "expired")
        return [item for item in given if item.job_id in self.jobs]

    def _cancel(self, owner: str) -> list[str]:
        held: list[str] = []
        for job_id in reversed(list(self.aborts)):
            job = self.jobs.get(job_id)
            if job is None:
                del self.aborts[job_id]
            elif job.owner in ("", owner) or job.where == "lapsed":
                if job.owner == owner:
                    held.append(job_id)
                self._adopt(job)
                self.bury(job, "dropped", "cancelled")
        return held

    def _expire(self, job: Job, owner: str, held: int) -> None:
        """Its lease ran out: back to its old place, and its owner is blamed unless it comes itself."""
        if job.owner == owner:
            self._requeue(job, later=False)
        elif job.owner in self.leaving:
            self._hand_back(job)
        else:
            self._blame(job, job.owner, held, forgivable=True)

    def _is_free(self, job: Job) -> bool:
        if job.where in ("ready", "later"):
            return True
        job.hurried = False  # only an abort that was cut off brings it here
        return False

    def _take(self, job: Job, owner: str) -> list[Given]:
        if job.payload is None and job.adopted:
            self.bury(job, "dead", "payload_missing")
            return []
        self._adopt(job)
        if job.payload is None:
            self.bury(job, "dead", "expired")
            return []
        if job.late:
            self.bury(job, "dead", "expired")
            return []
        job.owner, job.attempt, job.where, job.hurried = owner, job.attempt + 1, "leased", False
        for name in job.prefixes:
            self.prefixes[name] = owner
            self.has_prefixes.add(owner)
        return [self._given(job)]

    def _given(self, job: Job) -> Given:
        stored = {index: list(tokens) for index, tokens in job.progress.items()}
        return Given(job.job_id, job.attempt, bool(job.alone), frozenset(job.done), stored)

    # What the holder does.

    def holds(self, owner: str, job_id: str, attempt: int) -> bool:
        """Whether this attempt is the current one."""
        job = self.jobs.get(job_id)
        return job is not None and job.owner == owner and job.attempt == attempt

    def commit(self, owner: str, job_id: str, index: int, attempt: int, tokens: int) -> str:
        """One sequence; tokens < 0 is a plain call's answer."""
        job = self.jobs.get(job_id)
        if (job is None and self.keeps and job_id in self.ended) or (job and index in job.done):
            return "dup"
        if job is None or not self.holds(owner, job_id, attempt):
            self._acquit(owner, job_id)
            return "fenced"
        if tokens < 0:
            self.counts["called"] += job.n
            self.counts["enqueued"] -= job.n  # a plain call is no sequence
            self.finish(job, True)
            return "ok"
        if job.is_evaluated:
            self.evaluated.append((job_id, index, ""))
            self.counts["evaluated"] += 1
        elif job.mailbox:
            self.reply(job_id, index, "")
            self.counts["replied"] += 1
            self.counts["enqueued"] -= 1  # nor is what a caller asked for trained on
        else:
            self.results[self.partition(job_id)].append(Entry(job_id, index, job.n, ""))
            self.counts["committed"] += 1
        self.counts["tokens"] += tokens
        job.done.add(index)
        job.progress.pop(index, None)
        job.moved = job.attempt
        if len(job.done) == job.n:
            self.finish(job, True)
        return "ok"

    def checkpoint(self, owner: str, job_id: str, index: int, attempt: int, offset: int, tokens: list[int]) -> str:
        """One piece of progress."""
        job = self.jobs.get(job_id)
        if job is None or not self.holds(owner, job_id, attempt) or index in job.done:
            self._acquit(owner, job_id)
            return "fenced"
        stored = job.progress.get(index, [])
        if offset > len(stored):
            return "gap"
        if 0 < offset < len(stored):
            return "dup"
        job.progress[index] = stored[:offset] + tokens
        far = job.far.get(index, 0)
        if offset + len(tokens) > max(far, len(stored)):
            job.moved = attempt
        else:
            job.far[index] = max(far, len(stored))
        if job.mailbox and not job.is_evaluated:
            self.mailbox.append(f"delta {job_id}:{index} {offset}")
        return "ok"

    def renew(self, owner: str, held: dict[str, int]) -> list[str]:
        """The ids that are lost; a late renewal takes back the blame for a lease that ran out."""
        lost = self._cancel(owner)
        for job_id, attempt in held.items():
            job = self.jobs.get(job_id)
            if job and self.holds(owner, job_id, attempt):
                job.where, job.hurried = "leased", False
                continue
            self._acquit(owner, job_id)
            lost.append(job_id)
        return lost

    def release(self, owner: str, held: dict[str, int], *, later: bool, blame: bool) -> int:
        """Hand back; returns how many were held."""
        mine = [self.jobs[job_id] for job_id, attempt in held.items() if self.holds(owner, job_id, attempt)]
        for job_id in held.keys() - {job.job_id for job in mine} if not blame else ():
            self._acquit(owner, job_id)
        for job in mine:
            if blame:
                self._blame(job, owner, len(held), forgivable=False)
            else:
                self._requeue(job, later=later)
        return len(mine)

    def fail(self, owner: str, job_id: str, attempt: int, ending: Literal["dead", "dropped"], reason: str) -> int:
        """Sequences that ended, -1 when it is not held."""
        if not self.holds(owner, job_id, attempt):
            self._acquit(owner, job_id)
            return -1
        return self.bury(self.jobs[job_id], ending, reason)

    def reap(self, owner: str, *, killed: bool) -> int:
        """The leases of a dead process."""
        mine = [job for job in self.jobs.values() if job.owner == owner]
        self.turns.discard(owner)
        self.with_room.discard(owner)
        for job in mine:
            if killed or owner in self.leaving:
                self._hand_back(job)
            else:
                self._blame(job, owner, len(mine), forgivable=False)
        return len(mine)

    def stand_down(self, owner: str) -> None:
        """It was told to end."""
        self.leaving.add(owner)
        self.turns.discard(owner)
        self.with_room.discard(owner)

    # Blame and endings.

    def _hand_back(self, job: Job) -> None:
        self.counts["redelivered"] += 1
        self._requeue(job, later=False)

    def _blame(self, job: Job, culprit: str, held: int, *, forgivable: bool) -> None:
        if job.moved and job.moved == job.attempt:
            job.alone = job.shared = 0
            self._hand_back(job)
            return
        kind = "deaths" if job.alone and job.together == 1 else "shared"
        setattr(job, kind, getattr(job, kind) + 1)
        if forgivable:
            job.blames[culprit] = kind
        if job.deaths >= self.most:
            self.bury(job, "dead", "worker_deaths")
            return
        if job.alone or job.shared >= SHARED_DEATHS:
            job.alone = max(1, min(MOST_TOGETHER, (job.together if job.alone else held) // 2))
        self._hand_back(job)

    def _acquit(self, owner: str, job_id: str) -> None:
        """Whoever comes late is alive."""
        job = self.jobs.get(job_id)
        if job and (kind := job.blames.pop(owner, "")):
            setattr(job, kind, getattr(job, kind) - 1)

    def _requeue(self, job: Job, *, later: bool) -> None:
        later = later or job.is_deferred  # an abort that was cut off let it begin before its time
        if job.alone:
            self._set_apart(job, job.home, later=later)
        else:
            job.owner, job.hurried, job.due = "", False, job.home
            job.where = "later" if later else "ready"

    def _set_apart(self, job: Job, due: tuple[float, int], *, later: bool) -> None:
        job.owner, job.hurried, job.due = "", False, due
        job.where = "apart_later" if later else "apart"
