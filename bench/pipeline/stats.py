"""The few numbers that a benchmark is reduced to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median

from sluice.bench.percentile import percentile
from sluice.pipeline.errors import SluiceError

__all__ = ["Round", "Sample", "median", "percentile", "summary"]


@dataclass(frozen=True)
class Sample:
    """One side of one round: wall seconds, processor seconds of its engines' processes, tokens by sequence id."""

    seconds: float
    cpu_s: float
    tokens: Mapping[str, Sequence[int]]

    @property
    def num_tokens(self) -> int:
        """Tokens decoded in the round."""
        return sum(map(len, self.tokens.values()))

    @property
    def tok_s(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def digest(self) -> str:
        """Equal for equal tokens of equal sequences."""
        parts = "\n".join(f"{key} {list(self.tokens[key])}" for key in sorted(self.tokens))
        return sha256(parts.encode()).hexdigest()


@dataclass(frozen=True)
class Round:
    """Both sides over the same jobs."""

    bare: Sample
    pipeline: Sample

    @property
    def efficiency(self) -> float:
        """Pipeline rate over bare rate."""
        return self.pipeline.tok_s / self.bare.tok_s

    @property
    def cpu_efficiency(self) -> float:
        """Processor time of the bare engines over that of the workers: steadier than wall time on a busy machine."""
        return self.bare.cpu_s / self.pipeline.cpu_s if self.pipeline.cpu_s else 0.0

    def check(self) -> None:
        """Raise SluiceError unless both sides decoded the same sequences to the same lengths."""
        bare = {key: len(tokens) for key, tokens in self.bare.tokens.items()}
        queued = {key: len(tokens) for key, tokens in self.pipeline.tokens.items()}
        if bare != queued:
            differ = [key for key in bare.keys() | queued.keys() if bare.get(key) != queued.get(key)]
            raise SluiceError(
                f"the two sides did not decode the same: {len(differ)} sequences differ, e.g. {differ[0]} "
                f"({bare.get(differ[0])} tokens bare, {queued.get(differ[0])} through the queue); no ratio is fair"
            )


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians over the rounds; efficiency is the median of the ratios, not the ratio of the medians."""
    return {
        "bare_tok_s": median(each.bare.tok_s for each in rounds),
        "pipeline_tok_s": median(each.pipeline.tok_s for each in rounds),
        "efficiency": median(each.efficiency for each in rounds),
        "cpu_efficiency": median(each.cpu_efficiency for each in rounds),
    }
