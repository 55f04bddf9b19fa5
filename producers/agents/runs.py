"""Rollouts by id: each runs once, and a repeat gets the first answer.

    (no such id) ── start ──▶ queued ──▶ running ──▶ success | failure | cancelled ── keep_answers_s ──▶ (forgotten)

- The same id with a different body or protocol is a conflict; the callback key isn't compared.
- Answers are kept for `keep_answers_s`: the newest `keep_answers`, or fewer if they are large; or until the caller says
  that its trainer lost turns of the rollout. Running rollouts are never forgotten.
- With its answer a rollout drops its request, conversation and environment; only what repeats need is kept.
- An answer that can't be written is an error of its rollout, never the end of the server.
- In the asynchronous protocol the answer is delivered at least once, always with the same bytes, even if the rollout
  failed. Transport errors, 5xx and 429 are retried until the rollout's deadline; any other refusal is final. Failed
  deliveries are counted and logged; repeating the request delivers the answer again.
- A rollout outlives the request that started it. All rollouts end with this registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from hashlib import sha256
from typing import Literal

from sluice.pipeline.logs import get_logger
from sluice.producers.agents.executor import Execution
from sluice.producers.agents.state import AppState
from sluice.producers.agents.trainer_client import Trainer
from sluice.producers.http import strict_json
from sluice.producers.http.schemas import RolloutError, RolloutRequest, RolloutResponse, RolloutStatus, RunState

Protocol = Literal["sync", "async"]

_MOST_BYTES = 256 << 20  # of kept answers


class Conflict(Exception):
    """The id is taken by another request."""


class Draining(Exception):
    """New rollouts are no longer accepted."""


class Run:
    """One rollout, in progress or answered."""

    def __init__(self, request: RolloutRequest, protocol: Protocol, execution: Execution) -> None:
        self.rollout_id, self.protocol = request.rollout_id, protocol
        self.execution: Execution | None = execution  # until it is answered
        self.callback: tuple[Trainer, float] | None = None  # who is still to be told the answer, and until when
        self.fingerprint = _fingerprint(request, protocol)
        self.body: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()  # the answer as JSON
        self.task: asyncio.Task[None] | None = None
        self.ended: RunState | None = None
        self.is_cancelled, self.answered_at = False, 0.0

    @property
    def state(self) -> RunState:
        if self.is_cancelled:
            return RunState.CANCELLED
        return self.ended or (RunState.RUNNING if self.execution and self.execution.is_running else RunState.QUEUED)

    async def finish(self) -> None:
        """Run it to its answer, and drop all but what repeats need."""
        assert self.execution is not None, "a rollout runs once"
        self.ended, body = await _outcome(self.execution, self.rollout_id)
        self.answered_at = time.monotonic()
        if self.protocol == "async":
            self.callback = self.execution.trainer, self.execution.until
        self.execution = None
        self.body.set_result(body)

    def end(self, why: str, final_status: str = "ERROR") -> bool:
        """End it early, as an error; False if it has already ended."""
        return self.execution is not None and self.execution.end(why, final_status)

    def hand_back(self) -> None:
        """Stop unfinished: the caller may ask again, because the trainer keeps its turns."""
        self.body.add_done_callback(lambda body: body.cancelled() or body.exception())  # maybe nobody is waiting
        self.body.set_exception(Draining())
        if self.task is not None:
            self.task.cancel()


class Runs:
    """The registry of one server; use `open_runs`."""

    def __init__(self, state: AppState, tasks: asyncio.TaskGroup) -> None:
        self._state, self._tasks = state, tasks
        self._in_hand: dict[str, Run] = {}
        self._answered: OrderedDict[str, Run] = OrderedDict()  # the oldest answer first
        self._num_bytes = 0  # of the kept answers
        self.is_draining = False

    def start(self, request: RolloutRequest, protocol: Protocol) -> Run:
        """The rollout with this id, started now or earlier. Raises Conflict, Draining, LineFull."""
        self._forget_old()
        if run := self._find(request.rollout_id):
            if run.fingerprint != _fingerprint(request, protocol):
                raise Conflict
            if run.callback is not None and (not run.task or run.task.done()):
                run.task = self._tasks.create_task(self._delivered(run, *run.callback))
            return run
        if self.is_draining:
            raise Draining
        self._state.line.join()
        run = self._in_hand[request.rollout_id] = Run(request, protocol, Execution(request, self._state))
        run.task = self._tasks.create_task(self._run(run))
        return run

    def shown(self, rollout_id: str) -> RunState:
        """The state of the rollout with this id."""
        self._forget_old()
        run = self._find(rollout_id)
        return RunState.UNKNOWN if run is None else run.state

    def cancel(self, rollout_id: str) -> RunState:
        """End it; returns its state afterwards. An answered rollout keeps its answer."""
        run = self._in_hand.get(rollout_id)
        if run is not None and run.end("cancelled", "CANCELLED"):
            run.is_cancelled = True
        return self.shown(rollout_id)

    async def drain(self, grace_s: float, ending_s: float) -> None:
        """Accept no new rollouts; give running ones `grace_s`. Then tell waiting callers to ask again, and callers that
        get a callback that it was an error, within `ending_s`.
        """
        self.is_draining = True
        if tasks := self._unfinished():
            await asyncio.wait(tasks, timeout=grace_s)
            for run in self._in_hand.values():
                if run.protocol == "sync":
                    run.hand_back()
                else:
                    run.end("the rollout server is shutting down; retry with a new rollout_id")
            await asyncio.wait(tasks, timeout=ending_s)

    def end(self) -> None:
        """Cancel all running rollouts."""
        for task in self._unfinished():
            task.cancel()

    def forget(self, rollout_id: str) -> RunState:
        """Forget its answer, so that a repeat runs it again; returns its state afterwards.

        One that runs goes on, and an answer that is being delivered is kept.
        """
        if (run := self._answered.get(rollout_id)) and (run.task is None or run.task.done()):
            self._drop(run)
        return self.shown(rollout_id)

    def _unfinished(self) -> set[asyncio.Task[None]]:
        every = (run.task for run in (*self._in_hand.values(), *self._answered.values()))
        return {task for task in every if task is not None and not task.done()}

    def _find(self, rollout_id: str) -> Run | None:
        return self._in_hand.get(rollout_id) or self._answered.get(rollout_id)

    async def _run(self, run: Run) -> None:
        try:
            await run.finish()
        finally:
            self._state.line.leave()
        self._answered[run.rollout_id] = self._in_hand.pop(run.rollout_id)
        self._num_bytes += len(run.body.result())
        if run.callback is not None:
            await self._delivered(run, *run.callback)

    async def _delivered(self, run: Run, trainer: Trainer, until: float) -> None:
        if await deliver(trainer, run.rollout_id, run.body.result(), self._state, until=until):
            run.callback = None

    def _forget_old(self) -> None:
        """Drop answers that are too old or too many."""
        settings, oldest = self._state.settings, time.monotonic() - self._state.settings.keep_answers_s
        while self._answered:
            run = next(iter(self._answered.values()))
            fits = len(self._answered) <= settings.keep_answers and self._num_bytes <= _MOST_BYTES
            if fits and run.answered_at > oldest:
                break
            self._drop(run)

    def _drop(self, run: Run) -> None:
        del self._answered[run.rollout_id]
        self._num_bytes -= len(run.body.result())


@contextlib.asynccontextmanager
async def open_runs(state: AppState) -> AsyncGenerator[Runs]:
    """The registry; on exit, running rollouts are cancelled and awaited."""
    async with asyncio.TaskGroup() as tasks:
        runs = Runs(state, tasks)
        try:
            yield runs
        finally:
            runs.end()


def _fingerprint(request: RolloutRequest, protocol: Protocol) -> bytes:
    body = request.model_dump(mode="json", exclude={"callback_api_key"})
    return sha256(strict_json.encode([protocol, body])).digest()


async def _outcome(execution: Execution, rollout_id: str) -> tuple[RunState, bytes]:
    """How it ended, and its answer as JSON. Raises nothing but its own cancellation."""
    try:
        answer = await execution.run()
        body = answer_body(answer)
    except Exception as error:  # only a bug, which would end all rollouts of the server
        get_logger().exception("a rollout has no answer that can be sent", rollout=rollout_id)
        answer = RolloutResponse(
            rollout_id=rollout_id,
            status=RolloutStatus.ERROR,
            finish_reason="error",
            error_message=f"internal error ({type(error).__name__}); see the rollout server's log",
            extra_fields={"error_category": "internal_error"},
        )
        body = answer_body(answer)
    return RunState.SUCCESS if answer.status is RolloutStatus.COMPLETED else RunState.FAILURE, body


def answer_body(answer: RolloutResponse) -> bytes:
    """The JSON of an answer; its messages are unchanged."""
    body = answer.model_dump(mode="json", exclude={"final_messages"})
    return strict_json.encode(body | {"final_messages": [message.plain() for message in answer.final_messages]})


async def deliver(trainer: Trainer, rollout_id: str, body: bytes, state: AppState, *, until: float) -> bool:
    """Deliver the answer; returns whether the trainer has it."""
    try:
        await trainer.completed(body, until=max(until, time.monotonic() + state.retries.ending_s))
    except RolloutError as error:
        state.counters.callbacks.labels(error.category).inc()
        get_logger().error("could not deliver an answer", rollout=rollout_id, why=str(error))
        return False
    state.counters.callbacks.labels("delivered").inc()
    return True
