"""The task's result for a finished sequence, recomputed for display. Blocking; never raises on stored data.

    SequenceResult ──parse──▶ ──match──▶ Detection | Answer | Other, or Failed with the reason

- The steps are those of the run's configuration, so your own task runs here too. Nothing is stored.
- Codec and task are loaded once, on first use; a failure is shown on the page and retried later.
- Steps are the user's code and may never end, so they run in separate threads, at most `MOST` at a time:

| waits for     | unblocked by                                             |
|---------------|----------------------------------------------------------|
| a free thread | another step that ends, or `free_s`: then BusyError      |
| its own step  | the step, or `deadline_s`: then TimeoutError             |

- A timed-out step keeps its thread until it ends. Threads are daemons: they don't keep the dashboard from exiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.detection.geometry import Box, iou_matrix
from sluice.consumers.tasks.detection.match import DetectionMatch
from sluice.consumers.tasks.detection.parse import DetectionParse
from sluice.consumers.tasks.exact_answer import Verdict, extract
from sluice.consumers.tasks.registry import load_task
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.wire.messages import SequenceResult

Fate = Literal["matched", "false positive", "dropped", "missed"]
MOST = 2
T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """A predicted object with its truth, or either alone; `number` counts from 1 and labels its boxes."""

    number: int
    fate: Fate
    predicted: str = ""
    box: Box | None = None
    truth: str = ""
    truth_box: Box | None = None
    iou: float | None = None
    reason: str = ""  # why it was dropped


@dataclass(frozen=True)
class Detection:
    """Predictions in the answer's order, then the unmatched truths."""

    pairs: list[Pair]
    truncated: bool
    kind: str = "detection"

    def count(self, fate: Fate) -> int:
        return sum(pair.fate == fate for pair in self.pairs)


@dataclass(frozen=True)
class Answer:
    """Exact answers: the one extracted from the text, and the truth."""

    said: str | None
    truth: str | None
    right: bool
    pattern: str = ""
    kind: str = "answer"


@dataclass(frozen=True)
class Other:
    """A task unknown to this page: its own metrics for this sequence."""

    valid: bool
    metrics: dict[str, float]
    kind: str = "other"


@dataclass(frozen=True)
class Failed:
    """Why there is nothing to show."""

    message: str
    kind: str = "failed"


Outcome = Detection | Answer | Other | Failed


def outcome(result: SequenceResult, task: Task, context: TaskContext) -> Outcome:
    """Run parse and match again."""
    try:
        parsed = task.parse(result, context)
        matched = task.match(parsed, result.truth, context)
        if isinstance(parsed.value, DetectionParse) and isinstance(matched.value, DetectionMatch):
            return detection(parsed.value, matched.value)
        if isinstance(parsed.value, str) and isinstance(matched.value, Verdict):
            return _answer(parsed.value, matched.value)
        return Other(parsed.valid, dict(parsed.metrics | matched.metrics))
    except SluiceError as error:
        return Failed(str(error))
    except Exception as error:  # steps are user code: a failure must not break the page
        return Failed(f"the task {task.name} failed on this sequence: {type(error).__name__}: {error}")


def detection(parsed: DetectionParse, matched: DetectionMatch) -> Detection:
    """Every object and every truth, once."""
    pairs: list[Pair] = []
    for at, item in enumerate(parsed.objects):
        number = at + 1
        if item.reason is not None:
            pairs.append(Pair(number, "dropped", reason=item.reason))
        elif at in matched.truth_of:
            true = matched.truths[matched.truth_of[at]]
            iou = float(iou_matrix([item.box], [true.box])[0, 0])
            pairs.append(Pair(number, "matched", item.desc, item.box, true.desc, true.box, iou))
        else:
            pairs.append(Pair(number, "false positive", item.desc, item.box))
    for at in matched.unmatched:
        true = matched.truths[at]
        pairs.append(Pair(len(pairs) + 1, "missed", truth=true.desc, truth_box=true.box))
    return Detection(pairs, parsed.truncated)


def _answer(text: str, verdict: Verdict) -> Answer:
    if verdict.answer is None:
        return Answer(text.strip(), None, verdict.right)
    pattern = verdict.answer.pattern
    said = extract(text, pattern)
    return Answer(said, verdict.answer.text.strip(), verdict.right, pattern.pattern if pattern else "")


class TaskRunner:
    """Thread-safe."""

    def __init__(self, config: Config, steps: StepThreads) -> None:
        self.config, self.steps = config, steps
        self._lock, self._task_lock = threading.Lock(), threading.Lock()
        self._codec: HFTextCodec | None = None
        self._task: Task | None = None

    def codec(self) -> HFTextCodec:
        """Raises ModelError if the model's directory has no tokenizer."""
        with self._lock:
            if self._codec is None:
                self._codec = HFTextCodec(Path(self.config.model.path))
            return self._codec

    def task(self) -> tuple[Task, TaskContext]:
        """The same task as the consumer's. Raises ConfigError and ModelError."""
        codec, config = self.codec(), self.config
        with self._task_lock:  # a separate lock: an import that hangs must not block the tokens
            if self._task is None:
                self._task = load_task(config.rollout_matching)
            return self._task, TaskContext(codec, config.rollout_matching, config.seed, config.policy)


def runner_of(state: Any, config: Config) -> TaskRunner:
    """The application's single runner, rebuilt when the run's configuration changes."""
    before: TaskRunner | None = getattr(state, "runner", None)
    if before is not None and before.config is config:
        return before
    # The same threads: steps of the previous configuration that hang still count.
    state.runner = TaskRunner(config, before.steps if before else StepThreads())
    return state.runner


class BusyError(SluiceError):
    """Every thread is busy with another step."""


class StepThreads:
    """For one event loop."""

    def __init__(self, *, free_s: float = 3.0, deadline_s: float = 10.0) -> None:
        self.free_s, self.deadline_s = free_s, deadline_s
        self._free = asyncio.Semaphore(MOST)

    async def run(self, step: Callable[[], T]) -> T:
        """Returns or raises what the step does. Raises BusyError and TimeoutError."""
        try:
            async with asyncio.timeout(self.free_s):
                await self._free.acquire()
        except TimeoutError:
            raise BusyError(f"{MOST} other sequences are already being analysed; try again later") from None
        running = asyncio.wrap_future(_started(step))
        running.add_done_callback(self._end)
        await asyncio.wait([running], timeout=self.deadline_s)  # doesn't cancel: the thread stays taken until the end
        if not running.done():
            raise TimeoutError
        return running.result()

    def _end(self, ended: asyncio.Future[T]) -> None:
        self._free.release()
        if not ended.cancelled():
            ended.exception()  # nobody else asks for the error of an abandoned step


def _started(step: Callable[[], T]) -> Future[T]:
    made = Future[T]()
    made.set_running_or_notify_cancel()

    def work() -> None:
        try:
            made.set_result(step())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=work, name="task-step", daemon=True).start()
    return made
