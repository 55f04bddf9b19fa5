"""The policy term of one optimiser batch: its tokens in the packed rows, its share of the loss, its record.

- A sample takes part when it has an advantage; its tokens are those with `response_mask` 1, after its first.
- The loss is of `token_ids`, what was sampled; `labels` may say otherwise and belong to the cross-entropy.
- Whoever calls has filled `proximal_logprobs` at every such token, or has cleared its mask. A token that is marked as
  not scored (`proximal_versions` -1) has w = 1, whatever stands at it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consumers.pack import PackedRows
from consumers.training.losses import token_logprobs
from consumers.training.policy_loss import PolicySums, policy_loss
from consumers.training.proximal import proximal_of
from pipeline.config.types import PolicyConfig
from pipeline.errors import MessageError
from pipeline.wire.messages import TrainingSample


class PolicyRows(NamedTuple):
    """Laid out like the packed rows, all [R, L]: bool, 3 × float32, int32; 0 (versions -1) where the mask is off."""

    mask: np.ndarray
    proximal: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray


def policy_mask(sample: TrainingSample) -> np.ndarray:
    """bool (len(token_ids),): the tokens of the policy loss. Raises MessageError where their arrays are missing."""
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
            "; a task hands on the arrays of its result, and the trainer fills what is not scored yet"
        )
    return mask


def policy_rows(samples: Sequence[TrainingSample], packed: PackedRows) -> PolicyRows:
    """The policy's arrays of the samples in these rows."""
    shape = packed.input_ids.shape
    rows = PolicyRows(
        np.zeros(shape, dtype=bool),
        *(np.zeros(shape, dtype=np.float32) for _ in range(3)),
        versions=np.full(shape, -1, dtype=np.int32),
    )
    for place in packed.places:
        sample = samples[place.sample]
        mask = policy_mask(sample)
        if sample.advantage is None or not mask.any():
            continue
        at = (place.row, slice(place.start, place.start + place.length))
        rows.mask[at] = mask
        rows.proximal[at] = np.where(mask, proximal_of(sample)[0], 0)
        rows.behaviour[at] = np.where(mask, np.array(sample.logprobs), 0)
        rows.advantages[at] = np.where(mask, sample.advantage, 0)
        if len(sample.versions):
            rows.versions[at] = np.where(mask, np.array(sample.versions.expand()), -1)
    return rows


def temperature_rows(samples: Sequence[TrainingSample], packed: PackedRows, device: torch.device) -> Tensor | None:
    """float32 [R, L]: that of each token's sample; None where all are 1."""
    if all(samples[place.sample].temperature == 1 for place in packed.places):
        return None
    heats = torch.ones(packed.input_ids.shape, device=device)
    for place in packed.places:
        heats[place.row, place.start : place.start + place.length] = samples[place.sample].temperature
    return heats


class PolicyTerm:
    """Adds up over micro-batches; the loss is divided by the tokens of the whole batch."""

    def __init__(self, samples: Sequence[TrainingSample], options: PolicyConfig, version: int | None) -> None:
        self._samples, self._options, self._version = samples, options, version
        self._tokens = sum(int(policy_mask(sample).sum()) for sample in samples)
        self._sums = dict.fromkeys(PolicySums._fields, 0.0)
        self._gap_sum = self._gap_max = self._gap_tokens = 0.0

    def loss(self, logits: Tensor, packed: PackedRows) -> Tensor:
        """Σ m·pg·w of these rows / max(1, Σ m of the batch); `logits` float [R, L, V]."""
        rows = policy_rows(self._samples, packed)
        device = logits.device
        mask, proximal, behaviour, advantages, versions = (torch.from_numpy(part[:, 1:]).to(device) for part in rows)
        targets = torch.from_numpy(packed.input_ids[:, 1:]).to(device)
        heats = temperature_rows(self._samples, packed, device)
        picked = token_logprobs(logits[:, :-1][mask], targets[mask], None if heats is None else heats[:, 1:][mask])
        logp = picked.new_zeros(mask.shape).masked_scatter(mask, picked)
        sums = policy_loss(logp, proximal, behaviour, advantages, mask, self._options)
        values = torch.stack([value.detach().double() for value in sums]).tolist()
        for name, value in zip(sums._fields, values, strict=True):
            self._sums[name] += value
        if self._version is not None:
            self._compare(logp.detach(), behaviour, mask & (versions == self._version))
        return sums.loss / max(1, self._tokens)

    def _compare(self, logp: Tensor, behaviour: Tensor, on_policy: Tensor) -> None:
        gaps = (logp - behaviour)[on_policy].abs()
        if len(gaps):
            self._gap_sum += float(gaps.double().sum())
            self._gap_max = max(self._gap_max, float(gaps.max()))
            self._gap_tokens += len(gaps)

    def record(self) -> dict[str, float]:
        """Under `policy/` keys; the engine's gap only where tokens of the trainer's own version were in the batch."""
        sums, tokens, kept = self._sums, max(1, self._tokens), max(1.0, self._sums["kept"])
        members = [sample for sample in self._samples if sample.advantage is not None]
        rewards = [sample.reward for sample in members if sample.reward is not None]
        found = {
            "policy/loss": sums["loss"] / tokens,
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
        if self._gap_tokens:
            found["policy/engine_logprob_gap_mean"] = self._gap_sum / self._gap_tokens
            found["policy/engine_logprob_gap_max"] = self._gap_max
        return found
