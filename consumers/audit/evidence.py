"""Evidence about a sequence besides its recomputed logprobs: its advantage, its mask, and what was handed off.

Advantages are recomputed from the group's stored rewards, using the run's own definition:

- A group is trained in one step, so its members are looked up there, even if `--limit` leaves some of them out.
- The advantage compares all members that had a reward. `group_rewards` is their number; if fewer are stored (the
  trainer dropped some), the advantage can't be checked, unless it needs no comparison.
- With `reinforce_pp` the stored advantage is the reward. The step normalises it over what its batch has in the loss,
  and stores no such number, so what was trained can't be compared; a stored one that isn't the reward is wrong.
- Parts of one index (a rollout with a forked history) count once, with the reward of the first one.

A response mask is 1 exactly where the policy sampled the token and nothing left it out:

- A run stores its turns as `versions`: a token has one if the policy sampled it, and -1 if a tool, the template or a
  guard wrote it.
- `left_out` gives the trainer's reason for each token it left out, and each reason has a rule that can be rechecked.
- Your own task may clear sampled tokens; the built-in ones never do.

A token that was drawn under a grammar, a list of ids or bad words is one that these allow: the masks are derived again
from the recorded sampling, by the library and version that derived them then.

The sample as the consumer handed it off is in the run's history, a second copy of what was stored:

- The trainer changes the proximal logprobs, clears masks and the weights of stale tokens, and nothing else.
- A sequence is identified by its id and enqueue time: a reused id is another sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sluice.consumers.audit.report import Unchecked
from sluice.consumers.audit.stored import Stored
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.samples import group_advantages
from sluice.consumers.tasks.segments import LeftOut
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError, SluiceError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.user_modules import installed
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.messages import Reshaped, TrainingSample

_RELATIVE = 1e-6  # same code and numbers, maybe another machine
Place = int | str
"""Index in the group; of samples that do not say theirs, the id of the sequence."""
Mask = NDArray[np.bool_]
_BY_THE_TRAINER = (LeftOut.foreign, LeftOut.stale, LeftOut.missing)


@dataclass(frozen=True)
class Compared:
    """A recomputed advantage; `expected` is None if there should be none."""

    stored: float | None
    expected: float | None

    @property
    def is_right(self) -> bool:
        if self.stored is None or self.expected is None:
            return self.stored is self.expected
        return math.isclose(self.stored, self.expected, rel_tol=_RELATIVE, abs_tol=_RELATIVE)


@dataclass(frozen=True)
class _Group:
    expected: dict[Place, float]  # advantages of the members with a reward
    names: frozenset[str]
    is_forked: bool  # parts of one index have different rewards


class Groups:
    """The rewards of all stored samples, by step and group."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._members: dict[tuple[int, str], list[tuple[str, int, float | None]]] = {}
        self._compared: dict[tuple[int, str], _Group] = {}

    def noting(self, sequences: Iterable[Stored]) -> Iterator[Stored]:
        """Yields the same sequences, recording their rewards."""
        for stored in sequences:
            sample = stored.sample
            member = (sample.seq_id, sample.index, sample.reward)
            self._members.setdefault((stored.step, sample.group_id), []).append(member)
            yield stored

    def compare(self, stored: Stored) -> Compared | Unchecked | None:
        """None if there is no advantage and none is expected."""
        sample, policy = stored.sample, self._config.policy
        if not sample.group_rewards:
            if sample.advantage is None:
                return None
            if sample.index >= 0:
                return "advantage_of_task"
        group = self._group(stored)
        if policy.advantage not in ("reward", "reinforce_pp") and (gap := self._gap(sample, len(group.expected))):
            return gap
        found = Compared(sample.advantage, group.expected.get(_place(sample.seq_id, sample.index, group.names)))
        if not found.is_right:
            # The trainer may have dropped the first part, and parts may have their own rewards.
            return "group_incomplete" if group.is_forked else found
        return "advantage_normalised" if policy.advantage == "reinforce_pp" and sample.advantage is not None else found

    def _gap(self, sample: TrainingSample, rewards: int) -> Unchecked | None:
        if sample.index >= 0:
            return "group_incomplete" if rewards < sample.group_rewards else None
        is_known = self._config.rollout_matching.target is None and rewards >= max(2, self._config.producer.group_size)
        return None if is_known else "advantage_unstamped"

    def _group(self, stored: Stored) -> _Group:
        key = stored.step, stored.sample.group_id
        if key not in self._compared:
            names = frozenset(seq_id for seq_id, _, _ in self._members[key])
            firsts: dict[Place, float | None] = {}
            is_forked = False
            for seq_id, index, reward in self._members[key]:
                is_forked |= firsts.setdefault(_place(seq_id, index, names), reward) != reward
            rewards = {place: reward for place, reward in firsts.items() if reward is not None}
            policy = self._config.policy
            advantages = group_advantages(list(rewards.values()), policy.advantage, policy.advantage_std)
            self._compared[key] = _Group(dict(zip(rewards, advantages, strict=True)), names, is_forked)
        return self._compared[key]


def _place(seq_id: str, index: int, names: frozenset[str]) -> Place:
    """Without an index, `r/1` is a part of `r` if there is an `r`."""
    if index >= 0:
        return index
    whole, _, part = seq_id.rpartition("/")
    return whole if part.isdecimal() and whole in names else seq_id


@dataclass(frozen=True, eq=False)
class MaskFindings:
    """Shapes (tokens,). `unchecked` are the tokens with a rule that couldn't be checked."""

    off: Mask
    unchecked: dict[Unchecked, Mask] = field(default_factory=dict)


def check_mask(stored: Stored, config: Config, trainer_version: int | None) -> MaskFindings:
    """`trainer_version`: that of the weights that trained the sample; None if unknown."""
    sampled, is_on = stored.sampled, stored.mask == 1
    odd = (stored.mask != 0) & ~is_on
    if stored.left_out is not None:
        return _of_the_trainer(stored, stored.left_out, config, trainer_version, odd)
    cleared = sampled & ~is_on
    if config.rollout_matching.target is not None:
        return MaskFindings(odd, {"mask_of_task": cleared})
    # An older release's trainer cleared the proximal logprob with the mask, without recording why.
    silent = cleared & (stored.proximal_versions == -1) & (stored.proximal_logprobs == 0)
    if stored.sample.advantage is None:
        silent = np.zeros_like(cleared)
    return MaskFindings(odd | (cleared & ~silent), {"mask_unstamped": silent})


def _of_the_trainer(
    stored: Stored, left_out: NDArray[np.int32], config: Config, version: int | None, odd: Mask
) -> MaskFindings:
    sampled, is_on, policy = stored.sampled, stored.mask == 1, config.policy
    why = {reason: left_out == reason for reason in LeftOut}
    behind = np.arange(len(sampled)) >= max(1, stored.sample.prompt_len)
    usable = sampled & behind & np.isfinite(stored.logprobs)
    off = odd | (is_on != (sampled & why[LeftOut.no])) | ~np.isin(left_out, list(LeftOut))
    off |= why[LeftOut.foreign] & usable
    off |= why[LeftOut.missing] & (policy.on_missing_proximal != "mask")
    off |= why[LeftOut.stale] & (policy.on_stale != "mask")
    off |= why[LeftOut.truncated] & (not policy.mask_truncated)
    reshaped = np.zeros_like(sampled)
    for span in stored.sample.reshaped:
        reshaped[span.start : span.end] = True
    masked = policy.enabled and policy.on_reshaped == "mask"
    off |= (why[LeftOut.reshaped] & ~(reshaped & masked)) | (is_on & reshaped & masked)
    unchecked: dict[Unchecked, Mask] = {}
    if config.rollout_matching.target is None:
        off |= why[LeftOut.as_it_came]
    else:
        unchecked["mask_of_task"] = why[LeftOut.as_it_came] & sampled
    if version is None:
        unchecked["staleness"] = sampled
    else:
        line = Line.consecutive(version) if stored.line is None else stored.line.up_to(version)
        over = sampled & (line.lags(stored.versions) > policy.max_token_staleness)
        off |= (why[LeftOut.stale] & ~over) | (is_on & over) | (why[LeftOut.missing] & (stored.versions == version))
    # A token that nobody sampled is identified by its version, so that fault is called "version".
    return MaskFindings(off & (sampled | ~is_on), unchecked)


def handed_on(history: HistoryReader, stored: Stored) -> TrainingSample | None:
    """The sample as the consumer gave it to the trainer.

    None if the history doesn't hold it, or no longer does. Raises DataError for a damaged history.
    """
    found = history.sequence(stored.seq_id)
    sample = None if found is None else found.sample
    return sample if sample is not None and sample.enqueued_at == stored.sample.enqueued_at else None


def changed_tokens(stored: Stored, before: TrainingSample) -> NDArray[np.bool_]:
    """Where the stored sample differs from the one handed off; shape (tokens,)."""
    after = stored.sample
    size = len(after.token_ids)
    if len(before.token_ids) != size or _of_the_whole(before) != _of_the_whole(after):
        return np.ones(size, dtype=bool)
    cleared = _cleared_by_the_trainer(stored)
    mask = np.where(cleared, 0, np.array(before.response_mask.expand() or [0] * size))
    weights = np.where(cleared & (np.array(after.weights) == 0), 0, np.array(before.weights))
    changed = np.zeros(size, dtype=bool)
    for one, other in (
        (before.token_ids, after.token_ids),
        (before.labels, after.labels),
        (before.segments.expand(), after.segments.expand()),
        (before.versions.expand(), after.versions.expand()),
        (before.logprobs, after.logprobs),
        (weights, after.weights),
        (mask, stored.mask),
    ):
        was, now = np.array(one), np.array(other)
        changed |= _differ(was, now) if len(was) == len(now) else True
    return changed


def is_rewarded_alike(before: TrainingSample, after: TrainingSample) -> bool:
    """Whether reward, advantage and place equal those handed off."""
    names = ("group_id", "index", "group_rewards", "reward", "advantage")
    was, now = ([getattr(sample, name) for name in names] for sample in (before, after))
    return all(one == other or (one != one and other != other) for one, other in zip(was, now, strict=True))


def _cleared_by_the_trainer(stored: Stored) -> NDArray[np.bool_]:
    if stored.left_out is not None:
        return np.isin(stored.left_out, _BY_THE_TRAINER)
    if stored.sample.advantage is None:
        return np.zeros(len(stored.mask), dtype=bool)
    # An older release's trainer didn't record what it cleared, but cleared the proximal logprob as well.
    is_marked = stored.sampled & (stored.proximal_versions == -1)
    return is_marked & (stored.mask == 0) & (stored.proximal_logprobs == 0)


def _differ(was: NDArray[np.generic], now: NDArray[np.generic]) -> NDArray[np.bool_]:
    both_nan = (was != was) & (now != now)
    return (was != now) & ~both_nan


def _of_the_whole(sample: TrainingSample) -> tuple[object, ...]:
    return sample.prompt_len, sample.temperature, sample.keeps_cache, sample.task, sample.geometry


class Masks:
    """Derives the masks of constrained sequences again; opened for the first of them."""

    def __init__(self, config: Config) -> None:
        self._model = config.model
        self._opened: Any = None
        self._why_not = ""

    def compare(self, stored: Stored) -> tuple[Mask, Mask]:
        """(first token of each span that its constraint excludes, tokens whose masks can't be derived here)."""
        excluded, unknown = np.zeros_like(stored.sampled), np.zeros_like(stored.sampled)
        for span in stored.sample.reshaped:
            sampling = span.sampling
            if not (sampling.grammar or sampling.allowed_token_ids or sampling.bad_words):
                continue
            ends = np.flatnonzero(~stored.sampled[span.start : span.end])  # a guard's end, or what a task wrote
            part = slice(span.start, span.start + int(ends[0]) if len(ends) else span.end)
            try:
                at = self._first_excluded(span, stored.token_ids[part].tolist())
            except SluiceError as error:
                if not self._why_not:
                    self._why_not = str(error)
                    get_logger().warning("masks can't be derived again", sequence=stored.name, why=self._why_not)
                unknown[part] = True
                continue
            if at is not None:
                excluded[span.start + at] = True
        return excluded, unknown

    def _first_excluded(self, span: Reshaped, token_ids: list[int]) -> int | None:
        """Raises SluiceError if its masks can't be derived here."""
        if self._opened is None:
            self._opened = installed("sluice.engines", "constraints")(self._model)
        if span.sampling.grammar is not None and span.library != self._opened.library:
            here = self._opened.library or "no such library"
            raise DataError(f"the masks are of {span.library or 'an unknown library'}, and there is {here} here")
        return cast("int | None", self._opened.first_excluded(span.sampling, token_ids))


@dataclass(frozen=True, eq=False)
class Evidence:
    """Evidence about one sequence besides its recomputed logprobs."""

    mask: MaskFindings
    advantage: Compared | Unchecked | None  # None: it has none
    handed_on: Mask | None  # where it differs from what the consumer handed off; None: nothing to compare
    excluded: Mask  # by the constraint under which it was sampled
    masks_unknown: Mask  # sampled under a constraint whose masks can't be derived here
    is_rewarded_alike: bool = True  # reward and advantage equal those handed off


def evidence_of(
    stored: Stored,
    config: Config,
    groups: Groups,
    trained_at: Mapping[int, int],
    history: HistoryReader,
    masks: Masks,
) -> Evidence:
    before = handed_on(history, stored)
    excluded, unknown = masks.compare(stored)
    return Evidence(
        excluded=excluded,
        masks_unknown=unknown,
        mask=check_mask(stored, config, trained_at.get(stored.step)),
        advantage=groups.compare(stored),
        handed_on=None if before is None else changed_tokens(stored, before),
        is_rewarded_alike=before is None or is_rewarded_alike(before, stored.sample),
    )
