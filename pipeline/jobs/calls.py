"""The plain arq functions that run on a LeasedWorker now.

Their time limits are looked at once a turn: a timer for each would cost more than a short job does.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pipeline.jobs.one_call import fail, limit_of, run_call
from pipeline.jobs.types import Claim

if TYPE_CHECKING:
    from pipeline.jobs.worker import LeasedWorker


class Calls:
    """The running calls, by job id."""

    def __init__(self, worker: LeasedWorker) -> None:
        self._worker = worker
        self._running: dict[str, Claim] = {}
        self._limits: dict[str, float] = {}  # job id → monotonic seconds
        self._overdue: set[str] = set()
        self._told: set[str] = set()  # the function has ended, and its ending is being recorded

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._running

    async def accept(self, claim: Claim) -> None:
        """Start one; what cannot be called is a dead letter."""
        worker = self._worker
        if not claim.problem and claim.function not in worker.functions:
            known = ", ".join(worker.served())
            await fail(worker, claim, "unknown_function", f"{claim.function!r}; this worker serves {known}")
        elif claim.problem:
            await fail(worker, claim, claim.reason, claim.problem)
        else:
            self._running[claim.job_id] = claim
            self._told.discard(claim.job_id)
            limit_s = limit_of(worker, claim)
            if limit_s is not None:
                self._limits[claim.job_id] = time.monotonic() + limit_s
            task = worker.loop.create_task(run_call(worker, claim, self))
            worker.tasks[claim.job_id] = task
            task.add_done_callback(lambda ended: self._ended(claim, ended))

    def lose(self, job_id: str, attempt: int | None) -> bool:
        """Cancel one; False if it is not running here."""
        claim = self._running.get(job_id)
        if claim is None or attempt not in (None, claim.attempt):
            return False
        del self._running[job_id]
        if job_id in self._told:  # it is ready again already; the answer to that is still on its way
            return False
        self._worker.tasks[job_id].cancel()
        self._worker.jobs_failed += 1
        return True

    def take_back(self) -> list[Claim]:
        """Cancel all; their claims."""
        claims = list(self._running.values())
        self._running.clear()
        for claim in claims:
            if task := self._worker.tasks.get(claim.job_id):
                task.cancel()
        self._worker.jobs_retried += len(claims)
        return claims

    def end_overdue(self) -> None:
        """Cancel those that are out of time."""
        now = time.monotonic()
        for job_id in [job_id for job_id, limit in self._limits.items() if limit < now]:
            del self._limits[job_id]
            self._overdue.add(job_id)
            self._worker.tasks[job_id].cancel()

    def lift_limit(self, claim: Claim) -> None:
        """The function has ended: what records its ending takes the time it takes."""
        self._limits.pop(claim.job_id, None)
        self._told.add(claim.job_id)

    def has(self, claim: Claim) -> bool:
        """It runs here, and was not lost or given back."""
        return self._running.get(claim.job_id) is claim

    def is_overdue(self, claim: Claim) -> bool:
        """It was cancelled for its time."""
        return claim.job_id in self._overdue

    def _ended(self, claim: Claim, task: asyncio.Task[None]) -> None:
        if self._worker.tasks.get(claim.job_id) is task:
            del self._worker.tasks[claim.job_id]
            self._limits.pop(claim.job_id, None)
            self._overdue.discard(claim.job_id)
            self._told.discard(claim.job_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._worker.broken = error  # its job stays held, to be handed back with blame
            self._worker.wake.set()
        elif self.has(claim):
            del self._running[claim.job_id]
            self._worker.ended(claim)
