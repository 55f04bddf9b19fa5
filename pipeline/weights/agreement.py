"""When two passes of one model over the same tokens agree: the rule of every start-up proof. Torch-free.

Gaps are the differences of a token's logprob between two passes, in nats. They come in strata: the first tokens of a
sequence, those within the model's window, those beyond it. A sample that sees its neighbour moves the first, a window
that is lost moves all of the last.

- In float32 a gap may be 1e-4. In half precision it may be some rounding steps of a logprob. Where a model's own passes
  differ among themselves by more (the noise), it may be several times that. A ceiling keeps noise from hiding a fault.
- The median gap of every stratum is within it.
- All gaps are within it, but for a share in half precision, and for a smaller one where tokens are routed to experts: a
  tie between two experts, broken the other way by rounding, moves one token by any amount.
- What is no finite number never agrees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Gaps = NDArray[np.float64]

_FULL, _HALF = (1e-4, 1e-3), (0.02, 1.0)  # nats: the tolerance, and its ceiling
_STEPS = 2.0  # of rounding
_NOISE = 10.0  # times the median: of a fault that half the tokens do not have, it sees nothing
_MOST = 90  # percent
_FIRST = 8  # tokens of a sequence that its neighbour in a row would move
_ENOUGH = 4  # tokens that have a median worth the name
_HALF_SHARE, _ROUTED_SHARE = 0.05, 0.02
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Agreement:
    """What is held to be equal."""

    tolerance: float  # nats
    outliers: float  # share of tokens that may be over it

    @classmethod
    def of(cls, noise: Iterable[Gaps], plain: Iterable[Gaps], *, epsilon: float, config: Any) -> Agreement:
        """`noise`: gaps between the model's own passes; `plain`: logprobs, whose size rounding grows with.

        `epsilon`: of the dtype that the passes compute in; `config`: the text configuration, read for its experts.
        """
        full_precision = epsilon < _FULL[0]
        lowest, highest = _FULL if full_precision else _HALF
        size = np.abs(np.concatenate([np.zeros(1), *plain]))
        rounding = _STEPS * epsilon * float(np.percentile(size[np.isfinite(size)], _MOST))
        found = np.concatenate([np.zeros(0), *noise])
        found = found[np.isfinite(found) & (found > 0)]  # the same kernel over the same numbers gives no noise at all
        usual = float(np.median(found)) if len(found) else 0.0
        is_routed = any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)
        share = _ROUTED_SHARE if is_routed else 0.0
        return cls(min(max(lowest, rounding, _NOISE * usual), highest), share if full_precision else _HALF_SHARE)

    @property
    def is_fine(self) -> bool:
        """It shows what float32 shows."""
        return self.tolerance <= _FULL[1]

    def holds(self, strata: Sequence[Gaps]) -> bool:
        """Whether these are the gaps of two passes that compute the same."""
        gaps = np.concatenate([np.zeros(0), *strata])
        if not np.isfinite(gaps).all():
            return False
        if any(np.median(each) > self.tolerance for each in strata if len(each) >= _ENOUGH):
            return False
        return int((gaps > self.tolerance).sum()) <= math.ceil(self.outliers * len(gaps))


def window_of(config: Any) -> int:
    """Tokens that the layers which do not see everything see at most; 0 where all see everything.

    `config`: the text configuration of a transformers model.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any("sliding" in kind or "chunked" in kind for kind in kinds):
        return 0
    reaches = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return max((reach for reach in reaches if isinstance(reach, int)), default=0)


def strata(gaps: Gaps, first: int, window: int) -> list[Gaps]:
    """Gaps of one sequence, whose first one is that of token `first`, cut where faults would begin and end."""
    borders = [max(0, border - first) for border in (_FIRST, window + 1 if window else len(gaps) + first)]
    return [part for part in np.split(gaps, borders) if len(part)]


def largest(gaps: Iterable[Gaps]) -> float:
    """NaN where one is; 0 where there are none."""
    return float(np.concatenate([np.zeros(1), *gaps]).max())
