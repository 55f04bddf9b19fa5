"""What the killed worker's death cost, from the run's history.

    jobs' logs ─▶ attempts that the kill ended ─▶ when the next one began, and where
    sequences of these jobs ─▶ what became of them, and how many tokens were decoded again

- Counted: jobs, sequences, their ends, seconds, tokens of the later attempts, tokens restored from storage.
- Estimated: tokens that the killed worker had decoded itself, for they died with it: the seconds for which it held a
  job times its pace over the sequences that it had finished last, and no more than the next attempt decoded.
- Held-out prompts leave no log either: a kill that hit only those cost no training rollout.
- Calls of an agent rollout leave no log in the history: of such a run only the moment of the kill is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import JobRow, SequenceFilter, SequenceRow
from sluice.pipeline.queue.live_jobs import JobEvent

_PAGE = 500
_PACE_OF = 64  # sequences
_FAILED = ("lost", "handed_back")


@dataclass(frozen=True)
class Kill:
    """A SIGKILL to a worker: `at` is Unix time, `at_s` seconds since the demo's pipeline started."""

    worker: str
    pid: int
    at: float
    at_s: float
    running: int = 0  # sequences in it, by its last heartbeat
    heldout: int = 0  # jobs of held-out prompts that were queued or decoding, on whatever worker
    back_s: float | None = None  # seconds until its successor reported

    @property
    def why_free(self) -> str:
        """Why no training rollout was decoded again, though sequences ran in it."""
        if self.heldout:
            return (
                f"it held no training rollout; {self.heldout} held-out prompts were in the queue or on a worker, and "
                "those that it held were decoded again"
            )
        return "it had committed all its jobs since its last heartbeat, so nothing was decoded again"


@dataclass(frozen=True)
class TakenOver:
    """One job that the killed worker held; times are Unix seconds."""

    job_id: str
    claimed_at: float
    lost_at: float
    next_at: float | None = None  # when another attempt began; None: none did
    next_worker: str = ""
    ended_at: float | None = None


@dataclass(frozen=True)
class KillCost:
    """Sequences count once each; `trained` of them were trained, `others` ended otherwise."""

    kill: Kill
    jobs: Sequence[TakenOver]  # by the time of their first claim
    sequences: int = 0  # of these jobs, that the killed worker had not finished
    trained: int = 0
    others: Mapping[str, int] = field(default_factory=dict[str, int])
    decoded_again: int = 0  # tokens of the later attempts
    restored: int = 0  # tokens that the later attempts took from storage
    decoded_twice: int = 0  # estimated

    @property
    def waits_s(self) -> list[float]:
        """Seconds from the kill to each job's next attempt, shortest first; jobs without one are left out."""
        return sorted(max(0.0, job.next_at - self.kill.at) for job in self.jobs if job.next_at is not None)

    @property
    def workers(self) -> list[str]:
        """Who began the next attempts."""
        return sorted({job.next_worker for job in self.jobs if job.next_worker})

    @property
    def wait_s(self) -> float:
        """The median of `waits_s`; 0 if there are none."""
        return median(self.waits_s) if self.waits_s else 0.0


def kill_cost(history: Path, kill: Kill) -> KillCost:
    """Read a run's history directory; raises DataError if it can't be read."""
    reader = HistoryReader(history)
    try:
        held = [(job, taken) for job in _tried_again(reader) if (taken := _taken_over(job, kill)) is not None]
        pace = _pace(reader, kill)
        rows = [(row, taken) for job, taken in held for row in _again(reader, job, taken)]
        trained = sum(row.trained == "trained" for row, _ in rows)
        others = Counter(row.trained or row.state for row, _ in rows if row.trained != "trained")
        tokens = restored = twice = 0
        for row, taken in rows:
            detail = reader.sequence(row.seq_id)
            kept = detail.result.resumed_tokens if detail and detail.result else 0
            again = max(0, row.new_tokens - kept)
            tokens, restored = tokens + again, restored + kept
            twice += min(again, max(0, round(pace * (kill.at - taken.claimed_at)) - kept))
        jobs = sorted((taken for _, taken in held), key=lambda taken: (taken.claimed_at, taken.next_at or 0.0))
        return KillCost(kill, jobs, len(rows), trained, dict(others), tokens, restored, twice)
    finally:
        reader.close()


def _tried_again(reader: HistoryReader) -> list[JobRow]:
    """Jobs with more than one attempt, with their logs."""
    found: list[JobRow] = []
    before, more = "", True
    while more:
        page = reader.jobs(limit=_PAGE, before=before)
        found += [whole for row in page.rows if row.attempts > 1 and (whole := reader.job(row.job_id)) is not None]
        before, more = page.next, bool(page.next)
    return found


def _taken_over(job: JobRow, kill: Kill) -> TakenOver | None:
    """The attempt that ran on the killed worker at the kill; None if there was none."""
    claims = {event.attempt: event for event in job.events if event.kind == "claimed"}
    for event in job.events:
        claim = claims.get(event.attempt)
        if event.kind not in _FAILED or event.worker != kill.worker or claim is None:
            continue
        if claim.at <= kill.at <= event.at:
            return _after(job, claim, event)
    return None


def _after(job: JobRow, claim: JobEvent, lost: JobEvent) -> TakenOver:
    later = [event for event in job.events if event.attempt > lost.attempt]
    began = next((event for event in later if event.kind == "claimed"), None)
    ended = next((event for event in reversed(later) if event.kind == "ended"), None)
    return TakenOver(
        job.job_id, claim.at, lost.at,
        None if began is None else began.at, "" if began is None else began.worker, None if ended is None else ended.at,
    )  # fmt: skip


def _again(reader: HistoryReader, job: JobRow, taken: TakenOver) -> list[SequenceRow]:
    """The job's sequences that a later attempt ended."""
    first = next(event.attempt for event in job.events if event.kind == "claimed" and event.at == taken.claimed_at)
    rows = reader.sequences(SequenceFilter(job_id=job.job_id), limit=max(1, job.group_size)).rows
    return [row for row in rows if row.attempt > first or row.state == "dead"]


def _pace(reader: HistoryReader, kill: Kill) -> float:
    """Tokens a second of one sequence, over those that the worker finished last before the kill."""
    tokens, seconds, count, before = 0, 0.0, 0, ""
    while count < _PACE_OF:
        page = reader.sequences(SequenceFilter(worker=kill.worker), limit=_PAGE, before=before)
        for row in page.rows:
            if row.enqueued_at + row.queue_s + row.decode_s <= kill.at and row.decode_s > 0 and count < _PACE_OF:
                tokens, seconds, count = tokens + row.new_tokens, seconds + row.decode_s, count + 1
        before = page.next
        if not before:
            break
    return tokens / seconds if seconds else 0.0
