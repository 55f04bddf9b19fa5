"""The nearest-rank percentile."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """`share` in (0, 1]; raises ValueError for no values."""
    if not values or not 0 < share <= 1:
        raise ValueError(f"a percentile needs values and a share in (0, 1], got {len(values)} and {share}")
    return sorted(values)[math.ceil(share * len(values)) - 1]
