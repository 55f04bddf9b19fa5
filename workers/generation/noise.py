"""Uniform random numbers that depend on (seed, position) only: a counter-based stream (splitmix64).

A redelivered sequence draws the same numbers, whatever runs beside it; a resumed one goes on where it was.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Keys = npt.NDArray[np.uint64]


def stream_keys(seeds: list[int]) -> Keys:
    """Keys of the streams, shape (rows,); any Python int is a seed (taken modulo 2**64)."""
    return _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _GOLDEN)


def uniforms(keys: Keys, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64 in [0, 1 - 2**-52], shape (rows,), for token position `positions[row]` of each stream."""
    counters = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counters) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(values: Keys) -> Keys:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
