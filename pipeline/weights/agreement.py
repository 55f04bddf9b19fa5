"""When two passes of one model over the same tokens agree: the rule of every start-up proof. Torch-free.

Gaps are the differences of a token's logprob between two passes, in nats. They are split into strata: the first tokens
of a sequence, those within the model's window, those beyond it. If a sample sees its neighbour, the first stratum
moves; if the window is lost, all of the last one does.

- In float32 a gap may be 1e-4. In half precision it may be a few rounding steps of a logprob. If a model's own passes
  differ by more (the noise), it may be several times that. A ceiling keeps noise from hiding a fault.
- The median gap of every stratum must be within the tolerance.
- All gaps must be within it, except for a share in half precision, and a smaller one if tokens are routed to experts: a
  tie between two experts, broken the other way by rounding, moves one token by any amount.
- A non-finite gap never agrees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Gaps = NDArray[np.float64]

_FULL, _HALF = (1e-4, 1e-3), (0.02, 1.0)  # nats: tolerance and ceiling
_STEPS = 2.0  # in rounding steps
_NOISE = 10.0  # times the median, which ignores a fault in fewer than half the tokens
_MOST = 90  # percent
_FIRST = 8  # tokens of a sequence that a neighbour in its row would move
_ENOUGH = 4  # tokens for a meaningful median
_HALF_SHARE, _ROUTED_SHARE = 0.05, 0.02
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Agreement:
    """The limits within which two passes agree."""

    tolerance: float  # nats
    outliers: float  # share of tokens that may exceed it

    @classmethod
    def of(cls, noise: Iterable[Gaps], plain: Iterable[Gaps], *, epsilon: float, config: Any) -> Agreement:
        """`noise`: gaps between the model's own passes; `plain`: logprobs, since rounding grows with their size.

        `epsilon`: of the compute dtype; `config`: the text configuration, read for its experts.
        """
        full_precision = epsilon < _FULL[0]
        lowest, highest = _FULL if full_precision else _HALF
        size = np.abs(np.concatenate([np.zeros(1), *plain]))
        rounding = _STEPS * epsilon * float(np.percentile(size[np.isfinite(size)], _MOST))
        found = np.concatenate([np.zeros(0), *noise])
        found = found[np.isfinite(found) & (found > 0)]  # the same kernel on the same numbers gives no noise at all
        usual = float(np.median(found)) if len(found) else 0.0
        is_routed = any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)
        share = _ROUTED_SHARE if is_routed else 0.0
        return cls(min(max(lowest, rounding, _NOISE * usual), highest), share if full_precision else _HALF_SHARE)

    @property
    def is_fine(self) -> bool:
        """Whether it is as tight as in float32."""
        return self.tolerance <= _FULL[1]

    def holds(self, strata: Sequence[Gaps]) -> bool:
        """Whether these gaps are those of two equivalent passes."""
        gaps = np.concatenate([np.zeros(0), *strata])
        if not np.isfinite(gaps).all():
            return False
        if any(np.median(each) > self.tolerance for each in strata if len(each) >= _ENOUGH):
            return False
        return int((gaps > self.tolerance).sum()) <= math.ceil(self.outliers * len(gaps))


def window_of(config: Any) -> int:
    """Most tokens that a windowed layer sees; 0 if all layers see everything.

    `config`: the text configuration of a transformers model.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any("sliding" in kind or "chunked" in kind for kind in kinds):
        return 0
    reaches = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return max((reach for reach in reaches if isinstance(reach, int)), default=0)


def strata(gaps: Gaps, first: int, window: int) -> list[Gaps]:
    """Gaps of one sequence, starting at token `first`, split where faults would begin and end."""
    borders = [max(0, border - first) for border in (_FIRST, window + 1 if window else len(gaps) + first)]
    return [part for part in np.split(gaps, borders) if len(part)]


def largest(gaps: Iterable[Gaps]) -> float:
    """NaN if any is NaN; 0 if empty."""
    return float(np.concatenate([np.zeros(1), *gaps]).max())
