"""The policy loss: a loss per token (surrogate.py), weighted against staleness, and its mean over the batch.

    w = exp(proximal - behaviour)                               without gradient
    L = Σ m·u·loss·w / N

| aggregation | u of a token                      | N of the optimiser batch, from m alone           |
|-------------|-----------------------------------|--------------------------------------------------|
| token       | 1                                 | max(1, Σ m)                                      |
| sequence    | 1 / Σ m of its sequence           | sequences with a token                           |
| constant    | 1                                 | sequences with a token × `aggregation_tokens`    |

- Tokens with w > cap or w < floor are left out of the numerator and counted; u and N include them.
- u and N are fixed before the first micro-batch, so the split into micro-batches and rows has no effect.
- `mismatch`, where the trainer's logprob t under the proximal version is known (`measured`: the step starts from that
  version, so t is logp without gradient, or `before` once a minibatch has moved the weights): m = exp(t - proximal),
  w stays, r = exp(logp - t). truncate multiplies by min(m, C), mask by m where 1/C ≤ m ≤ C, and leaves the others out.
  At sequence level m is the product over the measured tokens of a sequence, at all of its tokens. Elsewhere m is
  unmeasured, and 1: also where the trainer computed `proximal` itself, as the engine's is unknown.
- `entropy_coef` c: - c·Σ kept entropies / max(1, Σ m), whatever the aggregation.
- `kl_coef` β: + β·Σ m·u·kl / N over the kept tokens with a reference score (reference.py), u and N as above.
- A token excluded by mask, cap, floor or mismatch has exactly zero gradient, whatever its values and whatever the
  surrogate does with them.

In a packed batch (`PolicyTerm`):

- A sample takes part if it has an advantage; its tokens are those with `response_mask` 1, except the first.
- The loss uses `token_ids`, the sampled ones; `labels` may differ and belong to the cross-entropy.
- The caller has filled `proximal_logprobs` at every such token, or cleared its mask. A token marked as not scored
  (`proximal_versions` -1) has w = 1, whatever its value.

Source: Hilton et al., 2022 (proximal vs. behaviour); Yao et al., 2025 (truncated importance sampling); Hu et al., 2025
(REINFORCE++); those of the losses are in surrogate.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from sluice.consumers.pack import PackedRows
from sluice.consumers.samples import group_advantages
from sluice.consumers.training.policy.proximal import proximal_of
from sluice.consumers.training.policy.reference import kl_estimate
from sluice.consumers.training.policy.surrogate import PolicyTokens, Surrogate, load_surrogate, losses_of
from sluice.consumers.training.row_logits import RowLogits
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.messages import TrainingSample

_MOST_LOG_RATIO = 20.0  # in metrics only: one outlier must not make a mean infinite


class PolicySums(NamedTuple):
    """Scalars, sums over tokens; only `loss` and `entropy` have a gradient."""

    loss: Tensor  # Σ m·u·loss·w over the kept tokens
    tokens: Tensor  # Σ m
    kept: Tensor  # tokens inside cap and floor
    importance_weight: Tensor  # Σ m·r
    approx_kl: Tensor  # Σ m·((r - 1) - log r): k3, its mean estimates KL(proximal ‖ trained)
    clipped: Tensor  # tokens where the clip applies (surrogate.py)
    dual_clipped: Tensor  # tokens that the dual clip changed
    behaviour_weight: Tensor  # Σ w over the kept tokens
    behaviour_kl: Tensor  # Σ m·(behaviour - proximal): k1, its mean estimates KL(behaviour ‖ proximal)
    capped: Tensor  # tokens with w > cap
    floored: Tensor  # tokens with w < floor, or w that isn't a number
    entropy: Tensor  # Σ entropies over the kept tokens; with gradient
    mismatch: Tensor  # Σ m over the measured tokens inside cap and floor, before it is cut
    measured: Tensor  # these tokens
    beyond: Tensor  # tokens that `mismatch` cut or left out
    kl: Tensor  # Σ m·u·kl over the kept tokens with a reference score; with gradient
    reference_kl: Tensor  # Σ k3 of trained ‖ reference over these tokens, whatever the estimator
    referenced: Tensor  # these tokens
    unreferenced: Tensor  # kept tokens without one


def policy_loss(
    logp: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    options: PolicyConfig,
    *,
    surrogate: Surrogate | None = None,
    shares: Tensor | None = None,
    measured: Tensor | None = None,
    entropies: Tensor | None = None,
    sequences: Tensor | None = None,
    num_sequences: int = 1,
    reference: Tensor | None = None,
    before: Tensor | None = None,
) -> PolicySums:
    """Sums over the tokens where `mask` is True.

    `logp` (with gradient), `proximal`, `behaviour`: log-probabilities in nats of the same tokens; `advantages`;
    all float, `mask` bool, all of one shape. `surrogate`: None for that of `options.loss`; `shares` float: u, None for
    1; `measured` bool: see above, None for nowhere; `entropies` float, nats, with gradient, None for 0; `sequences`
    int64: number of each token's sequence below `num_sequences`, None for one sequence; `reference` float, nats: under
    the reference, NaN where there is no score, None for no KL term; `before` float, nats: t, None for `logp`.

    Computed in float32 or wider; float64 stays float64. The log-ratios of the metrics are clamped to ±20; those of the
    loss are not.
    """
    logp = logp.to(torch.promote_types(logp.dtype, torch.float32))
    proximal, behaviour, advantages = (part.detach().to(logp) for part in (proximal, behaviour, advantages))
    weight = (proximal - behaviour).exp()
    capped = mask & (weight > options.weight_cap)
    floored = mask & ~capped & ~(weight >= options.weight_floor)
    kept = mask & ~capped & ~floored
    sequences = torch.zeros_like(mask, dtype=torch.int64) if sequences is None else sequences
    known = torch.zeros_like(mask) if measured is None or options.mismatch == "none" else kept & measured
    before = logp.detach() if before is None else before.detach().to(logp)
    gap = (before - proximal).where(known, 0)
    behaviour_kl = _bounded(behaviour - proximal, mask).sum()
    proximal = torch.where(known, before, proximal)
    staleness = weight
    weight = weight.where(kept, 0)
    beyond = torch.zeros_like(mask)
    mismatch = gap.exp()
    if options.mismatch != "none":
        if options.mismatch_level == "sequence":
            sums = gap.new_zeros(num_sequences).index_add(0, sequences.flatten(), gap.flatten())
            mismatch = sums.exp()[sequences]
        low = 1 / options.mismatch_cap if options.mismatch == "mask" else 0.0
        beyond = kept & ~((mismatch <= options.mismatch_cap) & (mismatch >= low))
        if options.mismatch == "mask":
            kept = kept & ~beyond
        weight = (weight * mismatch.clamp(max=options.mismatch_cap)).where(kept, 0)
    sampled = logp.detach().where(mask, 0)
    tokens = PolicyTokens(
        logp=logp.where(kept, sampled),
        proximal=proximal.where(mask, 0),
        behaviour=behaviour.where(mask, 0),
        advantages=advantages.where(mask, 0),
        mask=kept,
        sequences=sequences,
        num_sequences=num_sequences,
    )
    losses, clipped, dual_clipped = losses_of(surrogate or load_surrogate(options), tokens, options)
    weighted = losses.where(kept, 0) * weight
    change = _bounded(logp.detach() - proximal, mask)
    reference = torch.full_like(sampled, math.nan) if reference is None else reference.detach().to(logp)
    held = kept & reference.isfinite()
    kl = kl_estimate(logp.where(held, 0), reference.where(held, 0), options.kl_estimator)
    drift = _bounded(reference - sampled, held)
    return PolicySums(
        loss=(weighted if shares is None else weighted * shares).sum(),
        tokens=mask.sum(),
        kept=kept.sum(),
        importance_weight=change.exp().where(mask, 0).sum(),
        approx_kl=(change.expm1() - change).sum(),
        clipped=_count(clipped, mask),
        dual_clipped=_count(dual_clipped, mask),
        behaviour_weight=staleness.where(kept, 0).sum(),
        behaviour_kl=behaviour_kl,
        capped=capped.sum(),
        floored=floored.sum(),
        entropy=logp.new_zeros(()) if entropies is None else entropies.where(kept, 0).sum(),
        mismatch=mismatch.where(known, 0).sum(),
        measured=known.sum(),
        beyond=beyond.sum(),
        kl=(kl if shares is None else kl * shares).sum(),
        reference_kl=(drift.expm1() - drift).sum(),
        referenced=held.sum(),
        unreferenced=(kept & ~held).sum(),
    )


def _count(where: Tensor | None, mask: Tensor) -> Tensor:
    return mask.new_zeros((), dtype=torch.int64) if where is None else (mask & where).sum()


def _bounded(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio.where(mask, 0).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)


class PolicyRows(NamedTuple):
    """Laid out like the packed rows, all [R, L]; 0 (versions -1) where the mask is off. `versions` is -1 too where the
    trainer scored the token itself: no engine's score is there to compare with.

    bool, 3 × float32, 2 × int32, int64, 2 × float32; `sequences` has the index of the sample, `reference` NaN where
    there is no score.
    """

    mask: np.ndarray
    proximal: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray
    scored_by: np.ndarray  # the version of `proximal`, which is the token's own if it isn't older than the trainer's
    sequences: np.ndarray
    reference: np.ndarray
    before: np.ndarray


def policy_mask(sample: TrainingSample) -> np.ndarray:
    """bool (len(token_ids),): the tokens of the policy loss. Raises MessageError if their arrays are missing."""
    mask = np.zeros(len(sample.token_ids), dtype=bool)
    if sample.advantage is None:
        return mask
    needed = {"response_mask": sample.response_mask}
    mask[: len(sample.response_mask)] = np.array(sample.response_mask.expand(), dtype=np.int64) == 1
    mask[:1] = False
    if mask.any():
        needed |= {"logprobs": sample.logprobs, "proximal_logprobs": sample.proximal_logprobs}
    missing = [name for name, values in needed.items() if len(values) != len(mask)]
    if missing:
        raise MessageError(
            f"{sample.seq_id} has an advantage and {mask.sum()} tokens for the policy loss, but no {', '.join(missing)}"
            "; a task must pass on the arrays of its result; the trainer fills in scores that are missing"
        )
    return mask


def policy_rows(
    samples: Sequence[TrainingSample],
    packed: PackedRows,
    own: Mapping[str, np.ndarray] | None = None,
    reference: Mapping[str, np.ndarray] | None = None,
    before: Mapping[str, Sequence[float]] | None = None,
) -> PolicyRows:
    """The policy arrays of the samples in these rows; `own`, `reference` and `before` as in `PolicyTerm`."""
    shape = packed.input_ids.shape
    rows = PolicyRows(
        np.zeros(shape, dtype=bool),
        *(np.zeros(shape, dtype=np.float32) for _ in range(3)),
        versions=np.full(shape, -1, dtype=np.int32),
        scored_by=np.full(shape, -1, dtype=np.int32),
        sequences=np.zeros(shape, dtype=np.int64),
        reference=np.full(shape, np.nan, dtype=np.float32),
        before=np.zeros(shape, dtype=np.float32),
    )
    for place in packed.places:
        sample = samples[place.sample]
        mask = policy_mask(sample)
        if sample.advantage is None or not mask.any():
            continue
        at = (place.row, slice(place.start, place.start + place.length))
        rows.mask[at] = mask
        rows.sequences[at] = place.sample
        rows.proximal[at] = np.where(mask, proximal_of(sample)[0], 0)
        rows.behaviour[at] = np.where(mask, np.array(sample.logprobs), 0)
        rows.advantages[at] = np.where(mask, sample.advantage, 0)
        if reference and sample.seq_id in reference:
            rows.reference[at] = np.where(mask, reference[sample.seq_id], np.nan)
        if before:
            rows.before[at] = np.where(mask, np.array(before[sample.seq_id]), 0)
        if len(sample.versions):
            known = mask & ~own[sample.seq_id] if own and sample.seq_id in own else mask
            versions, scored_by = np.array(sample.versions.expand()), proximal_of(sample)[1]
            rows.versions[at] = np.where(known, versions, -1)
            rows.scored_by[at] = np.where(known, np.where(scored_by >= 0, scored_by, versions), -1)
    return rows


def temperature_rows(samples: Sequence[TrainingSample], packed: PackedRows, device: torch.device) -> Tensor | None:
    """float32 [R, L]: temperature of each token's sample; None if all are 1."""
    if all(samples[place.sample].temperature == 1 for place in packed.places):
        return None
    temperatures = torch.ones(packed.input_ids.shape, device=device)
    for place in packed.places:
        temperatures[place.row, place.start : place.start + place.length] = samples[place.sample].temperature
    return temperatures


class PolicyTerm:
    """Accumulates over micro-batches; the loss is divided by a number of the whole batch."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        options: PolicyConfig,
        version: int | None,
        surrogate: Surrogate | None = None,
        own: Mapping[str, np.ndarray] | None = None,
        reference: Mapping[str, np.ndarray] | None = None,
        moved: bool = False,
        before: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """`samples`: with advantages as `batch_normalised` leaves them; `version`: of the weights before the step;
        `surrogate`: None for that of `options.loss`; `own`: by seq_id, bool (len(token_ids),), the tokens whose
        proximal logprob the trainer computed; `reference`: by seq_id, float of that shape, logprobs under
        `kl_reference`, NaN where there is none; `moved`: a minibatch has changed the weights since: with `mismatch`,
        `before` has the logprobs under `version`, by seq_id.
        """
        self._own, self._reference, self._moved, self._before = own, reference, moved, before
        self._samples, self._options, self._version = samples, options, version
        self._surrogate = surrogate or load_surrogate(options)
        counts = [int(policy_mask(sample).sum()) for sample in samples]
        self._tokens = sum(counts)
        self._divisor, self._shares = aggregation(counts, options)
        self._sums = dict.fromkeys(PolicySums._fields, 0.0)
        self._gap_sum = self._gap_max = self._gap_tokens = 0.0

    @property
    def trains(self) -> bool:
        """Whether any token is in the loss."""
        return self._tokens > 0

    def loss(self, logits: RowLogits, packed: PackedRows) -> Tensor:
        """The part of these rows in the loss of the batch."""
        rows = policy_rows(self._samples, packed, self._own, self._reference, self._before)
        device = logits.device
        mask, proximal, behaviour, advantages, versions, scored_by, sequences, reference, before = (
            torch.from_numpy(part[:, 1:]).to(device) for part in rows
        )
        targets = torch.from_numpy(packed.input_ids[:, 1:]).to(device)
        temperatures = temperature_rows(self._samples, packed, device)
        heat = None if temperatures is None else temperatures[:, 1:][mask]
        picked, spread = logits.scores(mask, targets[mask], heat, entropies=self._options.entropy_coef != 0)
        logp = picked.new_zeros(mask.shape).masked_scatter(mask, picked)
        entropies = None if spread is None else logp.new_zeros(mask.shape).masked_scatter(mask, spread)
        sums = policy_loss(
            logp,
            proximal,
            behaviour,
            advantages,
            mask,
            self._options,
            surrogate=self._surrogate,
            shares=None if self._shares is None else self._shares.to(logp)[sequences],
            measured=None if self._version is None else scored_by == self._version,
            entropies=entropies,
            sequences=sequences,
            num_sequences=len(self._samples),
            reference=reference if self._options.kl_coef else None,
            before=before if self._before else None,
        )
        values = torch.stack([value.detach().double() for value in sums]).tolist()
        for name, value in zip(sums._fields, values, strict=True):
            self._sums[name] += value
        if self._version is not None and not self._moved:
            self._compare(logp.detach(), behaviour, mask & (versions == self._version))
        loss = sums.loss / self._divisor
        if self._options.kl_coef:
            loss = loss + self._options.kl_coef * sums.kl / self._divisor
        if entropies is None:
            return loss
        return loss - self._options.entropy_coef * sums.entropy / max(1, self._tokens)

    def add(self, part: PolicyTerm) -> None:
        """Count what a term of some of these samples has accumulated; its own divisor doesn't matter any more."""
        for name, value in part._sums.items():
            self._sums[name] += value
        self._gap_sum, self._gap_tokens = self._gap_sum + part._gap_sum, self._gap_tokens + part._gap_tokens
        self._gap_max = max(self._gap_max, part._gap_max)

    def gather(
        self, summed: Callable[[Sequence[float]], list[float]], largest: Callable[[Sequence[float]], list[float]]
    ) -> None:
        """Count what the terms of other ranks have accumulated, over all ranks."""
        *sums, self._gap_sum, self._gap_tokens = summed([*self._sums.values(), self._gap_sum, self._gap_tokens])
        self._sums = dict(zip(self._sums, sums, strict=True))
        (self._gap_max,) = largest([self._gap_max])

    def _compare(self, logp: Tensor, behaviour: Tensor, on_policy: Tensor) -> None:
        gaps = (logp - behaviour)[on_policy].abs()
        if len(gaps):
            self._gap_sum += float(gaps.double().sum())
            self._gap_max = max(self._gap_max, float(gaps.max()))
            self._gap_tokens += len(gaps)

    def record(self) -> dict[str, float]:
        """Metrics under `policy/` keys; the engine gap only if the batch has tokens of the trainer's own version."""
        sums, tokens, kept = self._sums, max(1, self._tokens), max(1.0, self._sums["kept"])
        members = [sample for sample in self._samples if sample.advantage is not None]
        rewards = [sample.reward for sample in members if sample.reward is not None]
        found = {
            "policy/loss": sums["loss"] / self._divisor,
            "policy/importance_weight": sums["importance_weight"] / tokens,
            "policy/approx_kl": sums["approx_kl"] / tokens,
            "policy/clip_ratio": sums["clipped"] / tokens,
            "policy/dual_clip_ratio": sums["dual_clipped"] / tokens,
            "policy/behaviour_importance_weight": sums["behaviour_weight"] / kept,
            "policy/behaviour_kl": sums["behaviour_kl"] / tokens,
            "policy/capped_tokens": sums["capped"],
            "policy/floored_tokens": sums["floored"],
            "policy/tokens": float(self._tokens),
            "policy/reward_mean": math.fsum(rewards) / max(1, len(rewards)),
            "policy/advantage_std": float(np.std([sample.advantage or 0.0 for sample in members])) if members else 0.0,
        }
        if self._options.entropy_coef:
            found["policy/entropy"] = sums["entropy"] / kept
        if self._options.kl_coef:
            if sums["referenced"]:
                found["policy/kl_reference"] = sums["reference_kl"] / sums["referenced"]
            found["policy/kl_loss"] = sums["kl"] / self._divisor
            found["policy/missing_reference_tokens"] = sums["unreferenced"]
        if self._options.mismatch != "none":
            if sums["measured"]:
                found["policy/mismatch_weight"] = sums["mismatch"] / sums["measured"]
            found["policy/mismatch_tokens"] = sums["beyond"]
            inside = tokens - sums["capped"] - sums["floored"] if self._tokens else 0.0
            found["policy/mismatch_unmeasured_tokens"] = inside - sums["measured"]
        if self._gap_tokens:
            found["policy/engine_logprob_gap_mean"] = self._gap_sum / self._gap_tokens
            found["policy/engine_logprob_gap_max"] = self._gap_max
        return found


def batch_normalised(samples: Sequence[TrainingSample], options: PolicyConfig) -> Sequence[TrainingSample]:
    """With `advantage: reinforce_pp`, the samples with (A - mean) / (std + 1e-6) over those in the loss; else the same.

    Each rollout counts once, whatever its length and number of parts; of one, or equal ones, the advantage is 0. An
    advantage that the task set stays as it is.
    """
    if options.advantage != "reinforce_pp":
        return samples
    taken: dict[tuple[str, int | str], float] = {}
    for one in samples:
        if one.advantage is not None and one.group_rewards and policy_mask(one).any():
            taken.setdefault(rollout_of(one), float(one.advantage))
    normal = dict(zip(taken, group_advantages(list(taken.values()), "group_norm", options.advantage_std), strict=True))
    return [
        replace(one, advantage=normal[rollout_of(one)])
        if one.advantage is not None and one.group_rewards and rollout_of(one) in normal
        else one
        for one in samples
    ]


def rollout_of(sample: TrainingSample) -> tuple[str, int | str]:
    """The same for all parts of a forked rollout."""
    return sample.group_id, sample.seq_id if sample.index < 0 else sample.index


def aggregation(counts: Sequence[int], options: PolicyConfig) -> tuple[int, Tensor | None]:
    """N, and u by sample, float64 [samples] (None: 1); `counts`: tokens of each sample in the loss."""
    sequences = sum(count > 0 for count in counts)
    match options.aggregation:
        case "token":
            return max(1, sum(counts)), None
        case "sequence":
            return max(1, sequences), torch.tensor([1 / max(1, count) for count in counts], dtype=torch.float64)
        case "constant":
            return max(1, sequences) * options.aggregation_tokens, None
