"""What became of the tokens of an optimiser step: the `policy/` keys of its record that versions decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Counts:
    """Tokens, but for `dropped` (samples); of one sample, or summed over many."""

    stale: int = 0  # over policy.max_token_staleness
    missing: int = 0  # they needed a proximal logprob, and there is none
    foreign: int = 0  # a producer left them without version or logprob, or with a wrong proximal version
    scored: int = 0  # joined from score jobs
    recomputed: int = 0  # scored by the trainer
    older: int = 0  # of a version below the trainer's; neither stale nor foreign
    valid: int = 0  # of these, with a proximal logprob
    dropped: int = 0
    trained: int = 0
    lag_sum: int = 0  # versions, over the trained ones
    lag_max: int = 0

    def take_lags(self, lags: Sequence[int]) -> None:
        """Versions between the trainer and each token that is trained."""
        self.trained += len(lags)
        self.lag_sum += sum(lags)
        self.lag_max = max(self.lag_max, max(lags, default=0))

    def add(self, other: Counts) -> None:
        """Sum up; the greatest lag is the greater of both."""
        largest = max(self.lag_max, other.lag_max)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.lag_max = largest

    def record(self) -> dict[str, float]:
        """Under `policy/` keys."""
        return {
            "policy/stale_tokens": float(self.stale),
            "policy/missing_proximal_tokens": float(self.missing),
            "policy/scored_tokens": float(self.scored),
            "policy/recomputed_tokens": float(self.recomputed),
            "policy/valid_proximal_share": self.valid / self.older if self.older else 1.0,
            "policy/version_lag_mean": self.lag_sum / self.trained if self.trained else 0.0,
            "policy/version_lag_max": float(self.lag_max),
            "policy/dropped_samples": float(self.dropped),
            "policy/foreign_tokens": float(self.foreign),
        }
