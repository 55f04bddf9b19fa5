"""Right, marked, wrong or unchecked: one word for every sampled token.

- wrong: a number is off, is no number, or claims another version than `versions[i] + 1`.
- unchecked: nothing was found wrong, and a version that it needs is not there.
- marked: the behaviour logprob is right, and there is no proximal one, which `proximal_versions[i] == -1` says.
- right: both logprobs are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

from consumers.audit.report import Fault, FaultKind
from consumers.audit.stored import Stored

_WORST = 5  # of a kind
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A sequence's logprobs as recomputed, shape (tokens,); NaN where nothing was."""

    behaviour: NDArray[np.float32]
    proximal: NDArray[np.float32]

    @classmethod
    def empty(cls, tokens: int) -> Recomputed:
        return cls(np.full(tokens, np.nan, dtype=np.float32), np.full(tokens, np.nan, dtype=np.float32))


@dataclass
class Tally:
    """Counts of tokens and the largest errors (nats) of what was judged so far."""

    tolerance: float
    tokens: int = 0
    right: int = 0
    marked: int = 0
    wrong: int = 0
    unchecked: int = 0
    told_apart: int = 0
    compared: int = 0
    behaviour_error: float = 0.0
    proximal_error: float = 0.0
    faults: Counter[FaultKind] = field(default_factory=Counter)
    versions_per_sequence: Counter[int] = field(default_factory=Counter)
    worst: list[Fault] = field(default_factory=list)

    def judge(self, stored: Stored, again: Recomputed, missing: Set[int]) -> None:
        """Count one sequence; `missing` are the versions that could not be recomputed."""
        sampled, scored, gone = stored.sampled, stored.scored, list(missing)
        no_behaviour, no_proximal = np.isin(stored.versions, gone), scored & np.isin(stored.proximal_versions, gone)
        behaviour, proximal = _error(stored.logprobs, again.behaviour), _error(stored.proximal_logprobs, again.proximal)
        compared = (sampled & ~no_behaviour, scored & ~no_proximal)
        off: dict[FaultKind, Mask] = {
            "version": (stored.versions < -1) | ((stored.mask != 0) & ~sampled),
            "proximal_version": (stored.proximal_versions != -1) & ~scored,
            "behaviour": compared[0] & ~(behaviour <= self.tolerance),
            "proximal": compared[1] & ~(proximal <= self.tolerance),
        }
        wrong = np.logical_or.reduce(list(off.values()))
        unchecked = sampled & (no_behaviour | no_proximal) & ~wrong
        good = sampled & ~wrong & ~unchecked
        self.tokens += int((sampled | wrong).sum())
        self.wrong += int(wrong.sum())
        self.unchecked += int(unchecked.sum())
        self.right += int((good & scored).sum())
        self.marked += int((good & ~scored).sum())
        differ = _error(again.behaviour, again.proximal) > self.tolerance
        self.told_apart += int((good & scored & differ).sum())
        self.compared += int(compared[0].sum() + compared[1].sum())
        self.behaviour_error = max(self.behaviour_error, _largest(behaviour[compared[0]]))
        self.proximal_error = max(self.proximal_error, _largest(proximal[compared[1]]))
        self.versions_per_sequence[len(np.unique(stored.versions[sampled]))] += 1
        self._keep_worst(stored, again, off)

    def _keep_worst(self, stored: Stored, again: Recomputed, off: dict[FaultKind, Mask]) -> None:
        for kind, where in off.items():
            places = np.flatnonzero(where).tolist()
            self.faults[kind] += len(places)
            known = [fault for fault in self.worst if fault.kind == kind]
            rest = [fault for fault in self.worst if fault.kind != kind]
            self.worst = rest + nlargest(
                _WORST, [*known, *(_fault(kind, stored, again, at) for at in places)], _badness
            )


def _error(stored: NDArray[np.float32], again: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.abs(stored.astype(np.float64) - again.astype(np.float64))


def _largest(errors: NDArray[np.float64]) -> float:
    """Of the numbers among them: JSON knows no other, and what is no number is wrong already."""
    return float(errors[np.isfinite(errors)].max(initial=0.0))


def _fault(kind: FaultKind, stored: Stored, again: Recomputed, at: int) -> Fault:
    of_proximal = kind in ("proximal", "proximal_version")
    value, other = (
        (stored.proximal_logprobs[at], again.proximal[at])
        if of_proximal
        else (stored.logprobs[at], again.behaviour[at])
    )
    return Fault(
        kind=kind,
        step=stored.step,
        seq_id=stored.seq_id,
        position=at,
        version=int(stored.versions[at]),
        proximal_version=int(stored.proximal_versions[at]),
        stored=float(value),
        recomputed=float(other),
    )


def _badness(fault: Fault) -> float:
    error = abs(fault.stored - fault.recomputed)
    return error if np.isfinite(error) else float("inf")
