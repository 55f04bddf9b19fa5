"""Packing: many short samples in one row of tokens, isolated from each other.

- Best-fit decreasing; the same lengths give the same rows. A sample over the budget gets its own row.
- `labels[i]` is the target AT position i, predicted from positions < i of the same sample; the loss does the
  shift. So the first position of every sample is off: only its neighbour could predict it.
- A sample with images costs its tokens, their expanded placeholders included, and the tokens of the vision tower.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sluice.pipeline.images.processor import VisionInputs
from sluice.pipeline.wire.messages import TrainingSample

IGNORED = -100


class Place(NamedTuple):
    """Position of a sample: columns [start, start + length) of `row`."""

    sample: int
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class PackedRows:
    """R rows of L columns; L is the longest row, shorter rows are padded on the right.

    `input_ids` int64 [R, L]; `labels` int64 [R, L], -100 where off; `weights` float32 [R, L], 0 where off;
    `position_ids` int64 [R, L], from 0 in every sample; `segment_ids` int32 [R, L], 0.. per row, padding -1.
    `token_types` int64 [R, L]: 1 at the expanded placeholders of images, else 0. `vision`: by index of the sample.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    position_ids: np.ndarray
    segment_ids: np.ndarray
    token_types: np.ndarray
    places: list[Place]
    vision: dict[int, VisionInputs] = field(default_factory=dict)


def ce_weights(sample: TrainingSample) -> np.ndarray:
    """Of the cross-entropy, float32 (len(token_ids),), a copy; 0 at the first token, which nothing predicts, and where
    the label is -100."""
    weights = np.where(np.asarray(sample.labels) == IGNORED, 0.0, sample.weights).astype(np.float32)
    weights[:1] = 0.0
    return weights


def ce_weight_sum(samples: Iterable[TrainingSample]) -> float:
    """Σ w of all of them, in float64."""
    return math.fsum(float(ce_weights(sample).sum(dtype=np.float64)) for sample in samples)


def ce_token_count(samples: Iterable[TrainingSample]) -> int:
    """Tokens with a weight."""
    return sum(int(np.count_nonzero(ce_weights(sample))) for sample in samples)


def pack_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Sample indices per row, every index once; a row with several samples holds at most `budget` tokens."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        fit = bisect_left(open_rows, (lengths[index], -1))
        if fit == len(open_rows):
            rows.append([index])
            free, row = budget - lengths[index], len(rows) - 1
        else:
            free, row = open_rows.pop(fit)
            rows[row].append(index)
            free -= lengths[index]
        if free > 0:
            insort(open_rows, (free, row))
    return rows


def shares_of(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Sample indices per rank, every index once, in about equal sums of costs; ascending within a rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        rank = sums.index(min(sums))
        shares[rank].append(index)
        sums[rank] += costs[index]
    return [sorted(share) for share in shares]


def empty_rows(pad_id: int) -> PackedRows:
    """A row of padding, without samples: a pass that takes part in collectives and trains nothing."""
    return _blank((1, 2), pad_id)


def _blank(shape: tuple[int, int], pad_id: int, vision: dict[int, VisionInputs] | None = None) -> PackedRows:
    return PackedRows(
        input_ids=np.full(shape, pad_id, dtype=np.int64),
        labels=np.full(shape, IGNORED, dtype=np.int64),
        weights=np.zeros(shape, dtype=np.float32),
        position_ids=np.zeros(shape, dtype=np.int64),
        segment_ids=np.full(shape, -1, dtype=np.int32),
        token_types=np.zeros(shape, dtype=np.int64),
        places=[],
        vision=vision or {},
    )


def collate(
    samples: Sequence[TrainingSample],
    rows: Sequence[Sequence[int]],
    pad_id: int,
    vision: Mapping[int, VisionInputs] | None = None,
) -> PackedRows:
    """Lay out the samples according to `rows`; `vision`: of those with images, by index of the sample."""
    widths = [sum(len(samples[index].token_ids) for index in row) for row in rows]
    seen = {index: vision[index] for row in rows for index in row if index in vision} if vision else {}
    packed = _blank((len(rows), max(widths, default=0)), pad_id, seen)
    for row, indices in enumerate(rows):
        start = 0
        for segment, index in enumerate(indices):
            length = len(samples[index].token_ids)
            _lay(packed, samples[index], Place(index, row, start, length), segment)
            start += length
    return packed


def _lay(packed: PackedRows, sample: TrainingSample, place: Place, segment: int) -> None:
    packed.places.append(place)
    if not place.length:
        return
    at = (place.row, slice(place.start, place.start + place.length))
    weights = ce_weights(sample)
    packed.input_ids[at] = sample.token_ids
    packed.labels[at] = np.where(weights != 0, np.asarray(sample.labels, dtype=np.int64), IGNORED)
    packed.weights[at] = weights
    packed.position_ids[at] = np.arange(place.length)
    packed.segment_ids[at] = segment
    if (vision := packed.vision.get(place.sample)) is not None:
        packed.token_types[at] = vision.token_types.reshape(-1)
