"""The sequences of a run, oldest first: from its history, or from the rollouts that its trainer kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from consumers.history.reader import HistoryReader
from consumers.history.records import SequenceDetail
from consumers.training.rollouts import read_rollouts
from pipeline.errors import DataError
from pipeline.wire.messages import SequenceResult, TrainingSample

Kind = Literal["trained", "handed-on"]


@dataclass(frozen=True)
class Exported:
    """One sequence; `result` is what a worker decoded, where the history has it."""

    sample: TrainingSample
    result: SequenceResult | None = None
    step: int | None = None  # that trained it
    version: int | None = None  # of the weights which that step started from


def read_run(directory: Path, kind: Kind) -> Iterator[Exported]:
    """At least one; raises DataError that says why there is none."""
    history, rollouts = directory / "history", directory / "rollouts"
    found = _from_history(history, kind) if any(history.glob("consumer-*.sqlite")) else iter(())
    first = next(found, None)
    if first is None and kind == "trained":
        found = _from_rollouts(rollouts)
        first = next(found, None)
    if first is None:
        raise DataError(f"{directory}: nothing to export; {_why(history, kind)}")
    return chain([first], found)


def _from_history(directory: Path, kind: Kind) -> Iterator[Exported]:
    with closing(HistoryReader(directory)) as reader:
        for detail in reader.handed_on():
            if detail.sample is not None and (kind == "handed-on" or _is_trained(detail)):
                yield _exported(detail, detail.sample)


def _is_trained(detail: SequenceDetail) -> bool:
    return detail.trained is not None and detail.trained.state == "trained"


def _exported(detail: SequenceDetail, sample: TrainingSample) -> Exported:
    """As trained, where it was: the trainer may have had more proximal logprobs than the consumer."""
    trained = detail.trained
    if trained is None:
        return Exported(sample, detail.result)
    if trained.proximal_logprobs:
        scores = {"proximal_logprobs": trained.proximal_logprobs, "proximal_versions": trained.proximal_versions}
        sample = replace(sample, **scores)
    return Exported(sample, detail.result, trained.step, trained.version)


def _from_rollouts(directory: Path) -> Iterator[Exported]:
    for step, batch in read_rollouts(directory):
        yield from (Exported(sample, step=step) for sample in batch.samples)


def _why(history: Path, kind: Kind) -> str:
    if not any(history.glob("consumer-*.sqlite")):
        return "it has no history; run with history.enabled: true, or with trainer.keep_rollouts (null: all steps)"
    with closing(HistoryReader(history)) as reader:
        handed_on = reader.totals()["handed_on"]
    if handed_on and kind == "trained":
        return f"{handed_on} sequences were handed on and none was trained yet; --source handed-on takes those"
    return "no sequence was handed to a trainer yet; `sluice status` says how far the run is"
