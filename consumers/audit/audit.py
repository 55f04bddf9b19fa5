"""One audit, from the run's directory to the report: every sampled token is right, marked, wrong or unchecked.

- wrong: a number is off, not finite, or claims another version than the one that was published from `versions[i]`; a
  marked token's proximal logprob isn't its behaviour logprob; its mask, or the advantage it was trained with, is
  incorrect; its own constraint excludes it; or it differs from what the consumer handed off.
- unchecked: nothing was found wrong, but a version it needs is gone, an image of its sequence is gone or changed, or it
  was sampled over a cache of older weights.
- marked: the behaviour logprob is right, and there is no proximal one, as `proximal_versions[i] == -1` says.
- right: both logprobs are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.consumers.audit.evidence import Compared, Evidence, Groups, Mask, Masks, evidence_of
from sluice.consumers.audit.recompute import Recomputed, pixels_of, recompute
from sluice.consumers.audit.report import Advantages, Fault, FaultKind, NotChecked, Report, Unchecked
from sluice.consumers.audit.stored import Stored, choose, line_of, read_sequences, trained_versions
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.run_files import HISTORY, ROLLOUTS, WEIGHTS
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError
from sluice.pipeline.weights.versions import newest_number

_WORST = 5  # per kind
_COUNTS = ("tokens", "right", "marked", "wrong", "unchecked", "told_apart", "compared")


def audit_run(
    directory: Path,
    config: Config,
    *,
    tolerance: float,
    steps: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Report:
    """Recompute and judge; raises DataError, WeightsError or ModelError."""
    if config.trainer.torch_threads:
        torch.set_num_threads(config.trainer.torch_threads)
    folder = directory / ROLLOUTS
    groups = Groups(config)
    trained_at = trained_versions(directory)
    line = line_of(trained_at)
    sequences, stored = choose(groups.noting(read_sequences(folder, steps, line)), limit, seed)
    if not any(sequence.sampled.any() for sequence in sequences):
        raise DataError(f"{folder}: none of its {stored} sequences has a token that the policy sampled")
    pairs = [(sequence, Recomputed.empty(len(sequence.token_ids))) for sequence in sequences]
    with pixels_of(config, sequences) as pixels:
        visible = [pair for pair in pairs if pair[0].name not in pixels.gone]
        needed = _needed([sequence for sequence, _ in visible])
        missing = recompute(directory / WEIGHTS, config.model, visible, needed, pixels)
    needed = _needed([sequence for sequence in sequences if sequence.name not in pixels.gone])
    missing &= set(needed)
    # The step after which a version is published is recorded before the version is.
    newest = max(newest_number(directory / WEIGHTS), max(trained_at.values()) + 1) if trained_at else None
    tally, masks = Tally(tolerance, frozenset(missing), newest), Masks(config)
    with closing(HistoryReader(directory / HISTORY)) as history:
        for sequence, again in pairs:
            if sequence.name in pixels.gone:
                tally.refuse(sequence, "images")
            elif not sequence.has_logprobs:
                tally.refuse(sequence, "no_logprobs")
            else:
                tally.judge(sequence, again, evidence_of(sequence, config, groups, trained_at, history, masks))
    return Report(
        run=directory.resolve().name,
        **{name: getattr(tally, name) for name in _COUNTS},
        max_error=max(tally.behaviour_error, tally.proximal_error),
        max_behaviour_error=tally.behaviour_error,
        max_proximal_error=tally.proximal_error,
        tolerance=tolerance,
        steps=sorted({sequence.step for sequence in sequences}),
        sequences=len(sequences),
        stored_sequences=stored,
        versions=[version for version in needed if version not in missing],
        missing_versions=sorted(missing),
        versions_per_sequence=dict(sorted(tally.versions_per_sequence.items())),
        faults=dict(tally.faults),
        worst=tally.worst,
        advantages=Advantages(**{word: tally.advantages[word] for word in ("right", "wrong", "unchecked")}),
        not_checked=tally.summary(),
    )


def _needed(sequences: Sequence[Stored]) -> list[int]:
    """Versions, in order."""
    return sorted(set[int]().union(*(sequence.needed() for sequence in sequences)))


@dataclass
class Tally:
    """Token counts and the largest errors (nats) so far."""

    tolerance: float
    missing: frozenset[int] = frozenset()  # versions that couldn't be recomputed
    newest: int | None = None  # the newest version that the run ever had, if known
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
    advantages: Counter[Literal["right", "wrong", "unchecked"]] = field(default_factory=Counter)
    not_checked: dict[Unchecked, list[int]] = field(default_factory=dict)  # sampled tokens, one entry per sequence

    def judge(self, stored: Stored, again: Recomputed, evidence: Evidence) -> None:
        """Count one sequence."""
        self.versions_per_sequence[len(np.unique(stored.versions[stored.sampled]))] += 1
        sampled, scored, gone = stored.sampled, stored.scored, list(self.missing)
        no_behaviour, no_proximal = np.isin(stored.versions, gone), scored & np.isin(stored.proximal_versions, gone)
        behaviour, proximal = _error(stored.logprobs, again.behaviour), _error(stored.proximal_logprobs, again.proximal)
        stale = stored.on_stale_cache
        compared = (sampled & ~no_behaviour & ~stale, scored & ~no_proximal)
        off: dict[FaultKind, Mask] = {
            "version": (stored.versions < -1) | ((stored.mask != 0) & ~sampled) | self._unheard_of(stored.versions),
            "proximal_version": ((stored.proximal_versions != -1) & ~scored & ~stored.lost)
            | self._unheard_of(stored.proximal_versions),
            "behaviour": compared[0] & ~(behaviour <= self.tolerance),
            "proximal": compared[1] & ~(proximal <= self.tolerance),
            "marked": _garbage(stored),
            "mask": evidence.mask.off,
            "advantage": self._advantage(stored, evidence),
            "constraint": evidence.excluded & sampled,
            "handed_on": np.zeros_like(sampled) if evidence.handed_on is None else evidence.handed_on,
        }
        wrong = np.logical_or.reduce(list(off.values()))
        unchecked = sampled & (no_behaviour | no_proximal | stale) & ~wrong
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
        self._skip("version_gone", unchecked & (no_behaviour | no_proximal))
        self._skip("stale_cache", unchecked & stale)
        for what, where in evidence.mask.unchecked.items():
            if what != "mask_of_task" or evidence.handed_on is None:  # else it is compared with the task's mask
                self._skip(what, where & ~wrong)
        self._skip("masks", evidence.masks_unknown & sampled & ~wrong)
        if evidence.handed_on is None:
            self._skip("handed_on", sampled)
        self._keep_worst(stored, again, evidence, off)

    def refuse(self, stored: Stored, why: Unchecked) -> None:
        """Count one sequence that can't be judged at all."""
        self._skip(why, stored.sampled)
        self.tokens += int(stored.sampled.sum())
        self.unchecked += int(stored.sampled.sum())

    def summary(self) -> list[NotChecked]:
        """What couldn't be checked, in order of first occurrence."""
        return [
            NotChecked(what=what, sequences=len(tokens), tokens=sum(tokens))
            for what, tokens in self.not_checked.items()
        ]

    def _skip(self, what: Unchecked, where: Mask) -> None:
        if where.any():
            self.not_checked.setdefault(what, []).append(int(where.sum()))

    def _unheard_of(self, versions: NDArray[np.int32]) -> Mask:
        return np.zeros_like(versions, dtype=bool) if self.newest is None else versions > self.newest

    def _advantage(self, stored: Stored, evidence: Evidence) -> Mask:
        """Trained tokens with a wrong advantage; counts the sequence, even if no token is wrong."""
        nothing, trained = np.zeros_like(stored.sampled), stored.sampled & (stored.mask == 1)
        found = evidence.advantage
        if not evidence.is_rewarded_alike or (isinstance(found, Compared) and not found.is_right):
            self.advantages["wrong"] += 1
            return trained
        if isinstance(found, str):
            self.advantages["unchecked"] += 1
            self._skip(found, trained)
        elif found is not None:
            self.advantages["right"] += 1
        return nothing

    def _keep_worst(self, stored: Stored, again: Recomputed, evidence: Evidence, off: dict[FaultKind, Mask]) -> None:
        for kind, where in off.items():
            places = np.flatnonzero(where).tolist()
            self.faults[kind] += len(places)
            if kind == "advantage":
                places = places[:1]  # one number for the whole sequence
            known = [fault for fault in self.worst if fault.kind == kind]
            rest = [fault for fault in self.worst if fault.kind != kind]
            self.worst = rest + nlargest(
                _WORST, [*known, *(_fault(kind, stored, again, evidence, at) for at in places)], _badness
            )


def _error(stored: NDArray[np.float32], again: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.abs(stored.astype(np.float64) - again.astype(np.float64))


def _largest(errors: NDArray[np.float64]) -> float:
    """Of the finite ones: JSON has no others, and a non-finite error is wrong already."""
    return float(errors[np.isfinite(errors)].max(initial=0.0))


def _garbage(stored: Stored) -> Mask:
    """Marked as not scored, but the value is neither the behaviour logprob nor, where it isn't trained, 0."""
    values, marked = stored.proximal_logprobs, stored.proximal_versions == -1
    if not len(stored.sample.proximal_logprobs):
        return np.zeros_like(marked)
    return marked & (values != stored.logprobs) & ((stored.mask == 1) | (values != 0))


def _fault(kind: FaultKind, stored: Stored, again: Recomputed, evidence: Evidence, at: int) -> Fault:
    value, other = _numbers(kind, stored, again, evidence, at)
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


def _numbers(kind: FaultKind, stored: Stored, again: Recomputed, evidence: Evidence, at: int) -> tuple[Any, Any]:
    """The stored value, and the expected one."""
    if kind in ("proximal", "proximal_version"):
        return stored.proximal_logprobs[at], again.proximal[at]
    if kind == "marked":
        return stored.proximal_logprobs[at], stored.logprobs[at]
    if kind == "mask":
        return stored.mask[at], 1 - (stored.mask[at] == 1)
    if kind == "advantage":
        expected = evidence.advantage.expected if isinstance(evidence.advantage, Compared) else None
        return _or_nan(stored.sample.advantage), _or_nan(expected)
    if kind in ("handed_on", "constraint"):
        return stored.token_ids[at], np.nan
    return stored.logprobs[at], again.behaviour[at]


def _or_nan(number: float | None) -> float:
    return float("nan") if number is None else number


def _badness(fault: Fault) -> float:
    error = abs(fault.stored - fault.recomputed)
    return error if np.isfinite(error) else float("inf")
