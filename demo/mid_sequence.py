"""Finds weight versions that landed in the middle of sequences, from the trained samples on disk.

- A version counts if at least one trained sequence has a token of it right after a token of an older one.
- Only tokens that the policy sampled count; the prompt has no version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sluice.consumers.training.step_log import read_rollouts


@dataclass(frozen=True)
class MidSequence:
    """`versions`: those that landed inside a sequence; `spans`: versions per sequence → number of sequences."""

    versions: frozenset[int]
    spans: dict[int, int]


def mid_sequence(run_dir: Path) -> MidSequence:
    """Read a run's rollouts; needs trainer.keep_rollouts: null (all). Raises DataError for a damaged file."""
    batches = (batch for _, batch in read_rollouts(run_dir / "rollouts"))
    return count_landed(sample.versions.expand() for batch in batches for sample in batch.samples)


def count_landed(sequences: Iterable[Sequence[float]]) -> MidSequence:
    """The same from the version of every token, -1 if the policy didn't sample it."""
    landed: set[int] = set()
    spans: Counter[int] = Counter()
    for versions in sequences:
        sampled = [int(version) for version in versions if version >= 0]
        landed |= {newer for older, newer in pairwise(sampled) if newer > older}
        spans[len(set(sampled))] += 1
    return MidSequence(frozenset(landed), dict(sorted(spans.items())))
