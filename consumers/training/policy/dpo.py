"""DPO on the pairs of groups: the best answer of each group against its worst, by reward.

    d(y) = Σ over the trained tokens of y of (log p - log p under the reference)
    margin = β·(d(best) - d(worst));   L = mean over pairs of -log σ(margin)

- A rollout in several parts is one answer. Of equal rewards the first counts. A group whose rewards don't differ makes
  no pair; nor does an answer with a token that isn't trained although it was sampled for it (foreign, too old), or
  without one of its parts (dropped here or by the consumer).
- A pair with a token without a reference score is left out and counted: the sum of an answer is whole, or not used.
- dL/dlogp is -βσ(-margin)/pairs at each token of the best, and the opposite at the worst. Those numbers come from a
  pass without gradient right before the update (`prepare`), so a pair may be split over rows and micro-batches.
- Nothing here depends on the version that sampled a token: there are no proximal logprobs, no ratio and no w.

Source: Rafailov et al., 2023 (Direct Preference Optimization); the loss is its sigmoid loss, as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.consumers.pack import PackedRows
from sluice.consumers.tasks.segments import LeftOut
from sluice.consumers.training.policy.loss import policy_mask, rollout_of, temperature_rows
from sluice.consumers.training.policy.proximal import Plan, fill
from sluice.consumers.training.row_logits import RowLogits
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.wire.messages import TrainingSample

NO_RECORD = frozenset(
    f"policy/{name}"
    for name in ("missing_proximal_tokens", "recomputed_tokens", "scored_tokens", "valid_proximal_share")
)
"""Keys of proximal logprobs, which this loss has none of."""

_CUT = (LeftOut.foreign, LeftOut.stale, LeftOut.missing, LeftOut.reshaped)
Score = Callable[[Sequence[TrainingSample]], list[list[float]]]


class Pair(NamedTuple):
    """Two answers of a group; each has one sample, or one for each part."""

    best: list[TrainingSample]
    worst: list[TrainingSample]

    @property
    def samples(self) -> list[TrainingSample]:
        return [*self.best, *self.worst]


def pairs_of(samples: Iterable[TrainingSample]) -> tuple[list[Pair], int]:
    """The pairs, and the number of groups with a reward that make none."""
    groups: dict[str, dict[object, list[TrainingSample]]] = {}
    for sample in samples:
        if sample.advantage is not None and sample.reward is not None:
            groups.setdefault(sample.group_id, {}).setdefault(rollout_of(sample), []).append(sample)
    found: list[Pair] = []
    for answers in groups.values():
        whole = [parts for parts in answers.values() if len(parts) >= parts[0].parts and all(map(_is_whole, parts))]
        if not whole:
            continue
        best, worst = max(whole, key=_reward), min(whole, key=_reward)
        if _reward(best) > _reward(worst):
            found.append(Pair(best, worst))
    return found, len(groups) - len(found)


def _is_whole(sample: TrainingSample) -> bool:
    return bool(policy_mask(sample).any()) and not any(code in _CUT for code in sample.left_out.expand())


def _reward(parts: Sequence[TrainingSample]) -> float:
    return parts[0].reward or 0.0


def without_proximal(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """The same plans, with no token to be scored under its next version."""
    found: dict[str, Plan] = {}
    for seq_id, plan in plans.items():
        usable, none = plan.tokens & ~plan.foreign & ~plan.stale, np.zeros_like(plan.tokens)
        found[seq_id] = replace(plan, on_policy=usable, recompute=none, ask=none)
    return found


def pair_members(plans: Mapping[str, Plan], options: PolicyConfig) -> dict[str, Plan]:
    """Those of `without_proximal` whose samples make pairs: the others need no reference score."""
    filled = [fill(plan, [], {}, options).sample for plan in plans.values()]
    pairs, _ = pairs_of(sample for sample in filled if sample is not None)
    return {sample.seq_id: plans[sample.seq_id] for pair in pairs for sample in pair.samples}


def dpo_loss(margins: Tensor) -> Tensor:
    """-log σ(margin), elementwise."""
    return torch.nn.functional.softplus(-margins)


class PairTerm:
    """Accumulates over micro-batches, as a PolicyTerm does; `prepare` comes before the first."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        options: PolicyConfig,
        reference: Mapping[str, NDArray[np.float64]] | None = None,
    ) -> None:
        """`reference`: by seq_id, (len(token_ids),), logprobs under `kl_reference`, NaN where there is none."""
        self._samples, self._beta = samples, options.dpo_beta
        pairs, self._skipped = pairs_of(samples)
        self._reference = {sample.seq_id: _scores(sample, reference or {}) for pair in pairs for sample in pair.samples}
        self._pairs = [pair for pair in pairs if all(map(self._is_scored, pair.samples))]
        self._unscored = len(pairs) - len(self._pairs)
        self.slopes: dict[str, float] = {}  # of the loss in each trained logprob of a sample, by seq_id
        self._loss = self._margin = 0.0  # sums
        self._count = self._right = self._tokens = 0

    def prepare(self, score: Score) -> None:
        """Compare the pairs under the weights in hand; `score` as `TrainStep.score`."""
        samples = [sample for pair in self._pairs for sample in pair.samples]
        if not samples:
            return
        rows = dict(zip((sample.seq_id for sample in samples), score(samples), strict=True))
        apart = {sample.seq_id: self._drift(sample, rows[sample.seq_id]) for sample in samples}
        sums = [[math.fsum(apart[one.seq_id] for one in answer) for answer in pair] for pair in self._pairs]
        margins = self._beta * torch.tensor([best - worst for best, worst in sums], dtype=torch.float64)
        slopes = (self._beta * torch.sigmoid(-margins) / len(self._pairs)).tolist()
        for pair, slope in zip(self._pairs, slopes, strict=True):
            self.slopes |= {sample.seq_id: -slope for sample in pair.best}
            self.slopes |= {sample.seq_id: slope for sample in pair.worst}
        self._loss, self._margin = float(dpo_loss(margins).sum()), float(margins.sum())
        self._count, self._right = len(self._pairs), int((margins > 0).sum())
        self._tokens = sum(int(policy_mask(sample).sum()) for sample in samples)

    @property
    def trains(self) -> bool:
        """Whether any pair is in the loss; known once it is prepared."""
        return bool(self.slopes)

    def loss(self, logits: RowLogits, packed: PackedRows) -> Tensor:
        """What has the gradient of these rows' part in the loss of the batch; its value is another."""
        slopes = np.zeros(packed.input_ids.shape, dtype=np.float32)
        mask = np.zeros(packed.input_ids.shape, dtype=bool)
        for place in packed.places:
            sample = self._samples[place.sample]
            if (slope := self.slopes.get(sample.seq_id)) is not None:
                at = (place.row, slice(place.start, place.start + place.length))
                mask[at] = policy_mask(sample)
                slopes[at] = slope
        if not mask.any():
            return logits.nothing()
        on, by, targets = (torch.from_numpy(part[:, 1:]).to(logits.device) for part in (mask, slopes, packed.input_ids))
        temperatures = temperature_rows(self._samples, packed, logits.device)
        heat = None if temperatures is None else temperatures[:, 1:][on]
        return (logits.logprobs(on, targets[on], heat) * by[on]).sum()

    def add(self, part: PairTerm) -> None:
        """Count what a term of some of these samples has accumulated."""
        self._loss, self._margin = self._loss + part._loss, self._margin + part._margin
        self._count, self._right = self._count + part._count, self._right + part._right
        self._tokens += part._tokens

    def record(self) -> dict[str, float]:
        """Metrics under `policy/` keys; accuracy and margin only if there are pairs."""
        rewards = [one.reward for one in self._samples if one.advantage is not None and one.reward is not None]
        pairs = max(1, self._count)
        found = {
            "policy/loss": self._loss / pairs,
            "policy/tokens": float(self._tokens),
            "policy/reward_mean": math.fsum(rewards) / max(1, len(rewards)),
            "policy/dpo_pairs": float(self._count),
            "policy/dpo_skipped_groups": float(self._skipped),
            "policy/dpo_unscored_pairs": float(self._unscored),
            "policy/missing_reference_tokens": float(sum(self._missing(seq_id) for seq_id in self._reference)),
        }
        if self._count:
            found["policy/dpo_margin"] = self._margin / pairs
            found["policy/dpo_accuracy"] = self._right / pairs
        return found

    def _is_scored(self, sample: TrainingSample) -> bool:
        return not self._missing(sample.seq_id)

    def _missing(self, seq_id: str) -> int:
        return int(np.isnan(self._reference[seq_id]).sum())

    def _drift(self, sample: TrainingSample, row: Sequence[float]) -> float:
        on = policy_mask(sample)
        return math.fsum((np.array(row, dtype=np.float64)[on] - self._reference[sample.seq_id]).tolist())


def _scores(sample: TrainingSample, reference: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Under the reference, of the tokens in the loss alone."""
    on = policy_mask(sample)
    found = reference.get(sample.seq_id)
    return np.full(int(on.sum()), np.nan) if found is None else found[on]
