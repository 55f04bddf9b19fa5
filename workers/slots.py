"""The slots of a decode worker: which sequences run in the engine, and which wait for a free row.

    claim ──▶ waiting ──start (a row is free)──▶ running ──ended──▶ removed with the job's last sequence

- The engine gets a few sequences more than its batch, so a free row is filled within the same step. A few more wait
  here, so nothing has to be fetched when a sequence ends.
- A job whose prompt is still being rendered takes no row; later jobs overtake it.
- A job that hasn't started can be put back at any time; one that has started stays.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.pipeline.queue import Claim
from sluice.pipeline.wire.messages import DecodeJob
from sluice.workers.job_prompts import JobPrompt


class Refusal(NamedTuple):
    """What the dead letters of sequences that aren't decoded say."""

    reason: str
    detail: str
    traceback: str = ""


@dataclass(eq=False)
class HeldJob:
    """One claim with its prompt, the indices still waiting, and its running tasks."""

    claim: Claim
    job: DecodeJob
    prompt: JobPrompt | asyncio.Task[JobPrompt]  # a task while it is rendered or its image is fetched
    waiting: deque[int]
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    started: bool = False
    given_back: bool = False  # it will come again; its sequences end without a result
    parked: bool = False  # likewise, at the end of this worker: what its sequences have is stored
    left: int = field(init=False)  # sequences that aren't over
    # What becomes of those that are over without a result, once the others are committed: they end, or they go back.
    refusal: Refusal | None = None  # the first of them
    too_early: bool = False

    def __post_init__(self) -> None:
        self.left = len(self.waiting)

    @property
    def ready(self) -> bool:
        """The prompt, or the error that prevented it, is available."""
        return isinstance(self.prompt, JobPrompt) or self.prompt.done()


class Slots:
    """Bounded by `capacity` sequences (a group may exceed it, because it is claimed whole)."""

    def __init__(self, max_batch: int) -> None:
        ahead = max_batch // 4
        self.max_batch = max_batch
        self.engine_limit = max_batch + max_batch // 8
        self.capacity = self.engine_limit + ahead
        self._jobs: dict[str, HeldJob] = {}
        self.running = 0
        self._waiting = 0

    def held(self) -> KeysView[str]:
        """Job ids."""
        return self._jobs.keys()

    def room(self) -> int:
        """Sequences worth claiming now: up to one batch first (other workers may want some), then the lookahead."""
        held = self.sequences()
        if held < self.max_batch:
            return self.max_batch - held
        return self.capacity - held if held <= self.engine_limit and self.capacity > self.max_batch else 0

    def sequences(self) -> int:
        """Running and waiting."""
        return self.running + self._waiting

    def fetching(self) -> int:
        """Jobs whose prompt isn't ready."""
        return sum(not held.ready for held in self._jobs.values())

    def pinned(self) -> int | None:
        """The version that the weights must stay at; None if no held job names one."""
        pins = (held.job.pinned_version for held in self._jobs.values())
        return next((pin for pin in pins if pin is not None), None)

    def full(self) -> bool:
        """The engine has a whole batch."""
        return self.running >= self.max_batch

    def add(self, held: HeldJob) -> None:
        """Add a new claim at the end of the queue."""
        self._jobs[held.claim.job_id] = held
        self._waiting += len(held.waiting)

    def fill(self, start: Callable[[HeldJob, int], asyncio.Task[None]]) -> None:
        """Start waiting sequences while the engine has free rows; `start` makes the task."""
        while self.running < self.engine_limit and (held := self._next()) is not None:
            index = held.waiting.popleft()
            held.started = True
            self._waiting -= 1
            self.running += 1
            held.tasks.add(start(held, index))

    def _next(self) -> HeldJob | None:
        """The first job with a sequence that can start."""
        return next((held for held in self._jobs.values() if held.waiting and held.ready), None)

    def end(self, held: HeldJob, task: asyncio.Task[None]) -> bool:
        """A task has ended; True if it was the last of a job that is still held."""
        self.running -= 1
        held.tasks.discard(task)
        if held.tasks or held.waiting or self._jobs.get(held.claim.job_id) is not held:
            return False
        del self._jobs[held.claim.job_id]
        return True

    def park(self) -> list[HeldJob]:
        """Mark the jobs that have started; they stay until they are taken back."""
        found = [held for held in self._jobs.values() if held.started]
        for held in found:
            held.parked = True
        return found

    def take_back(self, *, started: bool) -> list[HeldJob]:
        """Remove the jobs that haven't started, or all of them; their tasks are cancelled."""
        return [self._remove(held) for held in list(self._jobs.values()) if started or not held.started]

    def lose(self, job_id: str, attempt: int | None = None) -> bool:
        """Remove one job and cancel its tasks; False if the job (in that attempt) isn't held."""
        held = self._jobs.get(job_id)
        if held is None or attempt not in (None, held.claim.attempt):
            return False
        self._remove(held)
        return True

    def _remove(self, held: HeldJob) -> HeldJob:
        del self._jobs[held.claim.job_id]
        self._waiting -= len(held.waiting)
        held.waiting.clear()
        for task in held.tasks:
            task.cancel()
        if isinstance(held.prompt, asyncio.Task):
            held.prompt.cancel()
        return held
