"""The sample as the consumer handed it to the trainer, from the run's history: a second copy of what was stored.

- The trainer changes the proximal logprobs, clears masks and the weights of stale tokens; nothing else of it.
- A sequence is known by its id and the time it was enqueued: an id that was used again is another sequence.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from consumers.audit.stored import Stored
from consumers.history.reader import HistoryReader
from consumers.segments import LeftOut
from pipeline.wire.messages import TrainingSample

_BY_THE_TRAINER = (LeftOut.foreign, LeftOut.stale, LeftOut.missing)


class HandedOn:
    """The history of a run; use it with `with`. One without a history knows no sequence."""

    def __init__(self, directory: Path) -> None:
        self._reader = HistoryReader(directory) if directory.is_dir() else None

    def __enter__(self) -> HandedOn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._reader.close()

    def sample(self, stored: Stored) -> TrainingSample | None:
        """None when the history does not hold it, or not any more. Raises DataError for a damaged history."""
        found = self._reader.sequence(stored.seq_id) if self._reader is not None else None
        sample = None if found is None else found.sample
        return sample if sample is not None and sample.enqueued_at == stored.sample.enqueued_at else None


def changed_tokens(stored: Stored, before: TrainingSample) -> NDArray[np.bool_]:
    """Where the stored sample is not the one that was handed on; shape (tokens,)."""
    after = stored.sample
    size = len(after.token_ids)
    if len(before.token_ids) != size or _of_the_whole(before) != _of_the_whole(after):
        return np.ones(size, dtype=bool)
    cleared = _cleared_by_the_trainer(stored)
    mask = np.where(cleared, 0, np.array(before.response_mask.expand() or [0] * size))
    weights = np.where(cleared & (np.array(after.weights) == 0), 0, np.array(before.weights))
    changed = np.zeros(size, dtype=bool)
    for one, other in (
        (before.token_ids, after.token_ids),
        (before.labels, after.labels),
        (before.segments.expand(), after.segments.expand()),
        (before.versions.expand(), after.versions.expand()),
        (before.logprobs, after.logprobs),
        (weights, after.weights),
        (mask, stored.mask),
    ):
        was, now = np.array(one), np.array(other)
        changed |= _differ(was, now) if len(was) == len(now) else True
    return changed


def is_rewarded_alike(before: TrainingSample, after: TrainingSample) -> bool:
    """Whether reward, advantage and place are those that were handed on."""
    names = ("group_id", "index", "group_rewards", "reward", "advantage")
    was, now = ([getattr(sample, name) for name in names] for sample in (before, after))
    return all(one == other or (one != one and other != other) for one, other in zip(was, now, strict=True))


def _cleared_by_the_trainer(stored: Stored) -> NDArray[np.bool_]:
    if stored.left_out is not None:
        return np.isin(stored.left_out, _BY_THE_TRAINER)
    if stored.sample.advantage is None:
        return np.zeros(len(stored.mask), dtype=bool)
    # An older release's trainer did not say what it cleared, but cleared the proximal logprob with it.
    is_marked = stored.sampled & (stored.proximal_versions == -1)
    return is_marked & (stored.mask == 0) & (stored.proximal_logprobs == 0)


def _differ(was: NDArray[np.generic], now: NDArray[np.generic]) -> NDArray[np.bool_]:
    both_nan = (was != was) & (now != now)
    return (was != now) & ~both_nan


def _of_the_whole(sample: TrainingSample) -> tuple[object, ...]:
    return sample.prompt_len, sample.temperature, sample.task, sample.geometry
