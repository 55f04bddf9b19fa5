"""What the task makes of a finished sequence, computed again for display. Blocking; never raises on what is stored.

    SequenceResult ──parse──▶ ──match──▶ Detection | Answer | Other, or Failed with the reason

- The steps are those of the run's own configuration, so a task of your own runs here too.
- Nothing of this is stored or handed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from consumers.detection.geometry import Box, iou_matrix
from consumers.detection.match import DetectionMatch
from consumers.detection.parse import DetectionParse
from consumers.exact_answer import Verdict, extract
from consumers.task import Task, TaskContext
from pipeline.errors import SluiceError
from pipeline.wire.messages import SequenceResult

Fate = Literal["matched", "false positive", "dropped", "missed"]


@dataclass(frozen=True)
class Thing:
    """A predicted object with its truth, either of them alone; `number` counts from 1 and labels its boxes."""

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
    """Predictions in the order of the answer, then the truths that none of them matched."""

    things: list[Thing]
    truncated: bool
    kind: str = "detection"

    def count(self, fate: Fate) -> int:
        """How many have this fate."""
        return sum(thing.fate == fate for thing in self.things)


@dataclass(frozen=True)
class Answer:
    """Exact answers: what was read out of the text, and what is true."""

    said: str | None
    truth: str | None
    right: bool
    pattern: str = ""
    kind: str = "answer"


@dataclass(frozen=True)
class Other:
    """A task that this page does not know: its own metrics of this sequence."""

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
    """Parse and match once more."""
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
    except Exception as error:  # steps are the user's code: one that fails must not take the page with it
        return Failed(f"the task {task.name} failed on this sequence: {type(error).__name__}: {error}")


def detection(parsed: DetectionParse, matched: DetectionMatch) -> Detection:
    """Every object and every truth, once."""
    things: list[Thing] = []
    for at, item in enumerate(parsed.objects):
        number = at + 1
        if item.reason is not None:
            things.append(Thing(number, "dropped", reason=item.reason))
        elif at in matched.truth_of:
            true = matched.truths[matched.truth_of[at]]
            iou = float(iou_matrix([item.box], [true.box])[0, 0])
            things.append(Thing(number, "matched", item.desc, item.box, true.desc, true.box, iou))
        else:
            things.append(Thing(number, "false positive", item.desc, item.box))
    for at in matched.unmatched:
        true = matched.truths[at]
        things.append(Thing(len(things) + 1, "missed", truth=true.desc, truth_box=true.box))
    return Detection(things, parsed.truncated)


def _answer(text: str, verdict: Verdict) -> Answer:
    if verdict.answer is None:
        return Answer(text.strip(), None, verdict.right)
    pattern = verdict.answer.pattern
    said = extract(text, pattern)
    return Answer(said, verdict.answer.text.strip(), verdict.right, pattern.pattern if pattern else "")
