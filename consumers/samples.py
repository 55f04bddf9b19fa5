"""A group of results → its training samples, and a reason for each member without one.

- A reward from the agent's side takes precedence over that of a reward function, and both over the task's.
- With a policy loss, members with a reward also get their advantage within the group, unless the task set one.
  Parts of one index share one advantage: that of the first part that yields a sample.
- With `policy.zero_variance: filter` a group that trains nothing, such as one of equal rewards, is dropped: its credit
  goes back at once, and other prompts take its place in the batch.
- A sample has the images of its result, whatever the task. Their expanded placeholders are never trained. For a model
  that takes no images, a result with images is dropped.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from sluice.consumers.groups import Group, Place
from sluice.consumers.pack import ce_weights
from sluice.consumers.rewards import Refused, Reward
from sluice.consumers.tasks.rollout import rewarded
from sluice.consumers.tasks.segments import LeftOut
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.pipeline.config.types import ConsumerConfig, ModelConfig, PolicyConfig
from sluice.pipeline.errors import TaskError
from sluice.pipeline.telemetry import training_metrics
from sluice.pipeline.wire.messages import CUT_SHORT, DeadLetter, SequenceResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs

_DETAIL_CHARS = 1500
HAS_IMAGES = "has_images"
_MOST = 1e30  # limit of a reward or an advantage: the loss is in float32
_EPS = 1e-6


class Sampler:
    """Runs the task's three steps. Pure: the same group gives the same samples and letters."""

    def __init__(
        self, task: Task, context: TaskContext, config: ConsumerConfig, image_token_id: int | None = None
    ) -> None:
        """`image_token_id`: see `image_token_of`."""
        self._task, self._context, self._config = task, context, config
        self._image_token_id = image_token_id

    def samples_of(
        self, group: Group, rewards: Mapping[str, Reward | Refused] | None = None
    ) -> tuple[list[TrainingSample], list[DeadLetter]]:
        """Samples ordered by index and part, and letters for the members dropped here.

        `rewards`: of the reward functions, by sequence id, for those that `is_scored` holds for.
        """
        letters = list(group.unrecorded)
        samples: dict[Place, TrainingSample] = {}
        for result in group.living:
            outcome = self._outcome(result, (rewards or {}).get(result.seq_id))
            if isinstance(outcome, DeadLetter):
                letters.append(outcome)
            else:
                samples[result.index, result.part] = replace(outcome, index=result.index, parts=result.parts)
        if len(samples) < len(group.members) and self._config.on_incomplete_group == "drop":
            reason = f"another member of group {group.group_id} is missing"
            letters += [letter(sample.seq_id, "incomplete_group", reason) for sample in samples.values()]
            samples = {}
        weighed, policy = self._weighed(samples), self._context.policy
        # A group of one has nothing to compare with: a check of single rows would lose each of them.
        filters = policy.enabled and policy.zero_variance == "filter" and group.size > 1
        if filters and not _group_trains(weighed, policy):
            what = "makes no pair of whole answers" if policy.by_pairs else "trains no token"
            detail = (
                f"group {group.group_id} {what}: its rewards are equal or missing, or the masks are off; "
                "policy.zero_variance is filter"
            )
            return [], letters + [letter(sample.seq_id, "zero_variance", detail) for sample in weighed]
        return weighed, letters

    def _weighed(self, samples: dict[Place, TrainingSample]) -> list[TrainingSample]:
        policy = self._context.policy
        firsts: dict[int, float | None] = {}
        for (index, _), sample in samples.items():
            firsts.setdefault(index, sample.reward)
        rewards = {index: reward for index, reward in firsts.items() if reward is not None}
        if not policy.enabled or not rewards:
            return list(samples.values())
        found = group_advantages(list(rewards.values()), policy.advantage, policy.advantage_std)
        advantages = dict(zip(rewards, found, strict=True))
        return [
            replace(sample, advantage=advantages[index], group_rewards=len(rewards))
            if sample.advantage is None and index in advantages
            else sample
            for (index, _), sample in samples.items()
        ]

    def is_scored(self, result: SequenceResult) -> bool:
        """Whether a reward function is asked: not for what is dropped anyway, or comes with a reward."""
        return result.reward is None and self._refusal(result) is None

    def _refusal(self, result: SequenceResult) -> DeadLetter | None:
        if result.finish_reason in CUT_SHORT:
            return letter(result.seq_id, result.finish_reason, f"decode ended with {result.finish_reason}")
        if not result.has_logprobs:
            return letter(result.seq_id, "no_logprobs", "it was sampled without logprobs, which the losses need")
        if result.images and self._image_token_id is None:
            return letter(result.seq_id, HAS_IMAGES, blind(len(result.images)))
        return None

    def _outcome(self, result: SequenceResult, reward: Reward | Refused | None) -> TrainingSample | DeadLetter:
        if (refusal := self._refusal(result)) is not None:
            return refusal
        if isinstance(reward, Refused):
            return letter(result.seq_id, reward.reason, reward.detail)
        if reward is not None:
            result = replace(result, reward=reward.total)  # the steps see it as one from the agent's side
        try:
            parsed = self._task.parse(result, self._context)
            matched = self._task.match(parsed, result.truth, self._context)
            sample = _with_numbers(rewarded(self._task.target(matched, self._context), result.reward))
        except TaskError as error:
            return letter(result.seq_id, "invalid_truth", str(error))
        except Exception:  # steps are user code: a failure must not stop the run
            return letter(result.seq_id, "task_failed", traceback.format_exc()[-_DETAIL_CHARS:])
        try:
            training_metrics.check_keys(sample.metrics)
        except TaskError as error:
            return letter(result.seq_id, "task_failed", str(error))
        if self._context.policy.enabled and (problem := _not_for_policy(sample)) is not None:
            return letter(result.seq_id, *problem)
        length, most = len(sample.token_ids), self._config.max_sample_tokens
        if length > most:
            return letter(result.seq_id, "too_long", f"{length} tokens; consumer.max_sample_tokens is {most}")
        if reward is not None:
            sample = replace(sample, metrics={**sample.metrics, **reward.metrics})
        if result.images and self._image_token_id is not None:
            sample = _with_images(sample, result, self._image_token_id)
        sample = _limited(sample, result, self._context.policy)  # first: its rules hold for reshaped tokens as well
        return _without_reshaped(sample, result, self._context.policy)


def _not_for_policy(sample: TrainingSample) -> tuple[str, str] | None:
    """Reason and detail why the policy loss can't take it; None if it can."""
    for name, value in (("reward", sample.reward), ("advantage", sample.advantage)):
        if not _is_number(value):
            return "task_failed", f"{name} {value}: the policy loss needs a number of at most ±{_MOST:g}, or None"
    if any(sample.response_mask) and not len(sample.logprobs):
        return "no_logprobs", "its sample has tokens in the response mask, and no logprobs"
    return None


def _group_trains(samples: Sequence[TrainingSample], policy: PolicyConfig) -> bool:
    """Whether any loss has a gradient."""
    if any(ce_weights(sample).any() or sample.geometry for sample in samples):
        return True
    return _makes_pair(samples) if policy.by_pairs else any(_trains(sample) for sample in samples)


def _makes_pair(samples: Sequence[TrainingSample]) -> bool:
    """Whether two answers that the trainer's `pairs_of` compares differ in reward, if no token of theirs is too old."""
    answers: dict[int, list[TrainingSample]] = {}
    for sample in samples:
        if sample.advantage is not None and sample.reward is not None and any(sample.response_mask):
            answers.setdefault(sample.index, []).append(sample)
    return len({parts[0].reward for parts in answers.values() if len(parts) >= parts[0].parts}) > 1


def _trains(sample: TrainingSample) -> bool:
    """Whether the policy loss has a gradient. An advantage that the task set counts, whatever it is."""
    is_computed = sample.group_rewards > 0
    return bool(sample.advantage if is_computed else sample.advantage is not None) and any(sample.response_mask)


def _without_reshaped(sample: TrainingSample, result: SequenceResult, policy: PolicyConfig) -> TrainingSample:
    """The sample with its reshaped spans, and with the policy's mask off in them.

    A span holds while the sample's tokens are the result's; where a task wrote others, what it left as sampled is off
    too.
    """
    if not result.reshaped:
        return sample
    ids, begin = [*result.prompt_token_ids, *result.token_ids], len(result.prompt_token_ids)
    spans = [replace(one, start=one.start + begin, end=one.end + begin) for one in result.reshaped]
    alike = next((at for at, pair in enumerate(zip(ids, sample.token_ids, strict=False)) if pair[0] != pair[1]), None)
    length = len(sample.token_ids)
    alike = min(len(ids), length) if alike is None else alike
    spans = [replace(one, end=min(one.end, alike)) if one.end <= alike else replace(one, end=length) for one in spans]
    sample = replace(sample, reshaped=[one for one in spans if one.start < one.end])
    mask = np.array(sample.response_mask.expand())
    if not policy.enabled or policy.on_reshaped == "train" or not len(mask):
        return sample
    inside = np.zeros(length, dtype=bool)
    for span in sample.reshaped:
        inside[span.start : span.end] = True
    codes = np.array(sample.left_out.expand() or [LeftOut.no] * length)
    codes[inside & (mask == 1)] = LeftOut.reshaped
    return replace(
        sample,
        response_mask=Runs.of(np.where(inside, 0, mask).tolist()),
        left_out=Runs.of(codes.tolist()),
    )


def _limited(sample: TrainingSample, result: SequenceResult, policy: PolicyConfig) -> TrainingSample:
    """The sample with the policy's rules on length applied: a lower reward if overlong, nothing sampled in the losses
    if cut.
    """
    if not policy.enabled:
        return sample
    mask = np.array(sample.response_mask.expand())
    if policy.overlong_tokens is not None and sample.reward is not None:
        less = overlong_penalty(int(mask.sum()), policy.overlong_tokens, policy.overlong_buffer)
        metrics = {**sample.metrics, "reward/overlong": 0.0 - less}
        sample = replace(sample, reward=sample.reward - less, metrics=metrics)
    if policy.mask_truncated and result.finish_reason == "length":
        before = np.array(sample.left_out.expand() or [LeftOut.no] * len(mask))
        codes = np.where(mask == 1, LeftOut.truncated, before)
        weights = np.array(sample.weights)
        if len(mask):  # nor in the cross-entropy
            weights = np.where(mask == 1, 0.0, weights)
        sample = replace(
            sample,
            response_mask=Runs.of((mask * 0).tolist()),
            left_out=Runs.of(codes.tolist()),
            weights=FloatArray(weights.tolist()),
        )
    return sample


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """From 0 at limit - buffer tokens to 1 at `limit` and beyond, linear between (Yu et al., 2025, DAPO).

    >>> [overlong_penalty(length, 10, 4) for length in (6, 7, 10, 11)]
    [0.0, 0.25, 1.0, 1.0]
    """
    if buffer == 0:
        return float(length > limit)
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def _with_numbers(sample: TrainingSample) -> TrainingSample:
    """Convert the flags and scalars that a task records to finite numbers: the trainer reads nothing else."""
    if any(type(value) is not float for value in sample.metrics.values()):
        sample = replace(sample, metrics={name: float(value) for name, value in sample.metrics.items()})
    for name, value in sample.metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"the metric {name!r} is {value}; record a finite number, or leave the key out")
    if not np.isfinite(np.array(sample.weights)).all():  # one of them would make the whole batch's loss none
        raise ValueError("a weight is no finite number; give every token one")
    return sample


def _with_images(sample: TrainingSample, result: SequenceResult, image_token_id: int) -> TrainingSample:
    """The sample with the images of its result, and their placeholders off; a token that was sampled isn't one."""
    ids = np.array(sample.token_ids)
    versions = np.array(sample.versions.expand() or [-1] * len(ids))
    is_placeholder = (ids == image_token_id) & (versions < 0)
    weights, mask = np.array(sample.weights), np.array(sample.response_mask.expand() or [0] * len(ids))
    sample = replace(sample, images=result.images)
    if weights[is_placeholder].any():
        sample = replace(sample, weights=FloatArray(np.where(is_placeholder, 0.0, weights).tolist()))
    if mask[is_placeholder].any():
        sample = replace(sample, response_mask=Runs.of(np.where(is_placeholder, 0, mask).tolist()))
    return sample


def image_token_of(model: ModelConfig) -> int | None:
    """Id of the token that images expand to, from the model's config.json; None if the model takes no images."""
    try:
        found: Any = msgspec.json.decode((Path(model.path) / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    token = found.get("image_token_id", found.get("image_token_index")) if isinstance(found, dict) else None
    return token if isinstance(token, int) and found.get("vision_config") and model.variant != "text" else None


def _is_number(value: float | None) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= _MOST)


def blind(num_images: int) -> str:
    """Why a sequence with images in its prompt isn't trained."""
    images = "1 image" if num_images == 1 else f"{num_images} images"
    return (
        f"its prompt has {images}, but the run's model takes none: its tokens would be trained without them; use a "
        "model with a vision part (model.variant auto or vlm), or decode such prompts with `sluice generate`"
    )


def letter(seq_id: str, reason: str, detail: str) -> DeadLetter:
    """The dead letter of a sequence that a consumer drops."""
    return DeadLetter(seq_id=seq_id, reason=reason, state="dropped", detail=detail[:_DETAIL_CHARS], at=time.time())


Advantage = Literal["group_norm", "group_mean", "rloo", "reinforce_pp", "reward"]


def group_advantages(
    rewards: Sequence[float], kind: Advantage, std: Literal["population", "sample"] = "population"
) -> list[float]:
    """One number per finite reward; equal rewards (such as a group of one) give exactly 0, except as the reward itself.

    group_norm: (r - mean) / (std + 1e-6); group_mean: r - mean; rloo: r - mean of the others (Ahmadian et al., 2024);
    reward, reinforce_pp: r. The trainer normalises the last over its batch (policy/loss.py). `std` divides by n, or by
    n - 1 (sample).

    >>> group_advantages([1.0, 0.0], "group_mean")
    [0.5, -0.5]
    """
    if kind in ("reward", "reinforce_pp") or not rewards:
        return list(rewards)
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "group_mean":
        return centred
    if kind == "rloo":
        return [value * len(rewards) / (len(rewards) - 1) for value in centred]
    degrees = len(centred) - (std == "sample")
    deviation = math.sqrt(math.fsum(value * value for value in centred) / degrees)
    return [value / (deviation + _EPS) for value in centred]
