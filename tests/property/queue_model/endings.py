"""What the model holds, and how a job of it ends."""

from __future__ import annotations

from collections import Counter
from hashlib import sha1
from typing import Literal

from tests.property.queue_model.state import Entry, Job, Row

ANSWERED_WORDS = 16  # a mailbox shorter than this takes answers themselves, all small here


class Endings:
    """Jobs, streams and counts of one run."""

    def __init__(self, partitions: int, keeps: bool, most: int) -> None:
        self.partitions, self.keeps, self.most = partitions, keeps, most
        self.jobs: dict[str, Job] = {}
        self.ended: dict[str, bool] = {}  # job id → every sequence was committed
        self.aborts: dict[str, None] = {}
        self.counts: Counter[str] = Counter()
        self.results: list[list[Entry]] = [[] for _ in range(partitions)]
        self.replies: dict[str, str] = {}  # sequence → reason of its letter, "" for a result
        self.mailbox: list[str] = []  # what the caller was told, in order
        self.dead: list[Row] = []
        self.dropped: list[Entry] = []
        self.evaluated: list[tuple[str, int, str]] = []  # job, index, reason of its letter or ""
        self.leaving: set[str] = set()  # workers that were told to end
        self.turns: set[str] = set()  # workers that empty themselves for suspects
        self.last: dict[str, tuple[int, list[str]]] = {}  # owner → number of its last claim that took jobs, their ids
        self.prefixes: dict[str, str] = {}  # of a prompt → the worker that has it
        self.has_prefixes: set[str] = set()  # workers that took a job with one
        self.with_room: set[str] = set()  # those of them that had room at their last claim
        self.latest = 0
        self._stamp = 0

    def stamp(self) -> int:
        """Later than everything so far."""
        self._stamp += 1
        return self._stamp

    def bury(self, job: Job, ending: Literal["dead", "dropped"], reason: str) -> int:
        """End what is not committed, and the job."""
        missing = [index for index in range(job.n) if index not in job.done]
        if job.is_evaluated:
            self.evaluated += [(job.job_id, index, reason) for index in missing]
            self.counts["evaluated"] += len(missing)
            self.counts[f"evaluated:{reason}"] += len(missing)
            self.finish(job, False)
            return len(missing)
        for index in missing:
            first = (index == missing[0] and job.payload) or b""
            if ending == "dead":
                self.dead.append(Row(job.job_id, index, job.n, reason, first))
            elif not job.mailbox:
                self.dropped.append(Entry(job.job_id, index, job.n, reason))
            if job.mailbox:
                self.reply(job.job_id, index, reason)
            elif not job.call:
                self.results[self.partition(job.job_id)].append(Entry(job.job_id, index, job.n, reason))
        if job.mailbox and ending == "dropped":
            self.counts["replied"] += len(missing)
            self.counts["enqueued"] -= len(missing)
        else:
            self.counts[ending] += len(missing)
            self.counts[f"{ending}:{reason}"] += len(missing)
        self.finish(job, False)
        return len(missing)

    def reply(self, job_id: str, index: int, reason: str) -> None:
        """The caller is answered."""
        name = f"{job_id}:{index}"
        self.replies[name] = reason
        self.mailbox.append(f"answer {name}" if len(self.mailbox) < ANSWERED_WORDS else name)

    def finish(self, job: Job, whole: bool) -> None:
        """Only the tombstone is left; `whole`: every sequence was committed."""
        del self.jobs[job.job_id]
        self.counts["evaluating"] -= job.is_evaluated
        self.aborts.pop(job.job_id, None)
        self.ended[job.job_id] = whole

    def partition(self, job_id: str) -> int:
        """Where the members of a group meet."""
        return int(sha1(job_id.encode()).hexdigest()[:8], 16) % self.partitions
