"""One step over a list of samples: packed micro-batches, one loss over all of them, or over each minibatch.

- loss = Σ w·CE / N + Σ geometry / boxes + the policy loss (policy/loss.py), with sums over the whole optimiser batch,
  so the split into micro-batches doesn't change it. A sample may contribute to any of the three terms.
- N is Σ w without a policy loss: weights are relative. With one, N is the number of tokens with a weight, and weights
  are coefficients, as `policy.ce_weight` is: by Σ w a factor of all weights would cancel.
- With `trainer.minibatches` each part of the batch is an optimiser batch. A step of the session, its record, checkpoint
  and version stay those of the whole batch: what counts steps or staleness doesn't see the parts. The record has the
  same means over all of them: each part weighs as much as it has tokens, boxes or sequences.
- On several ranks each sample is trained by one of them, and all sums are over all ranks.
- Needs no broker and no session: benchmarks and tests train with it directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from sluice.consumers.pack import PackedRows, ce_token_count, ce_weight_sum, ce_weights
from sluice.consumers.training import lora
from sluice.consumers.training.forward import Proof, TrainerForward, VisionSource
from sluice.consumers.training.losses import expected_coordinates, geometry_loss, row_logprobs, weighted_cross_entropy
from sluice.consumers.training.model import freeze_vision
from sluice.consumers.training.optimizer import learning_rate, make_optimizer
from sluice.consumers.training.policy.dpo import PairTerm
from sluice.consumers.training.policy.loss import PolicyTerm, batch_normalised, temperature_rows
from sluice.consumers.training.policy.surrogate import load_surrogate
from sluice.consumers.training.ranks.group import Ranks
from sluice.consumers.training.row_logits import RowLogits
from sluice.consumers.training.shards import whole
from sluice.pipeline.config.types import PolicyConfig, TrainerConfig
from sluice.pipeline.images.features import ImageFeatures
from sluice.pipeline.wire.messages import TrainingSample


class TrainStep:
    """Model, optimiser and the update."""

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        pad_id: int,
        row_tokens: int,
        coord_ids: Sequence[int] = (),
        policy: PolicyConfig = PolicyConfig(),  # noqa: B008  (frozen)
        images: VisionSource | None = None,
        ranks: Ranks | None = None,
        shard: Callable[[Any], None] = lambda _model: None,
    ) -> None:
        """`images`: of the samples; None if they have none. `ranks`: all of them make each call, with equal arguments,
        and get equal results; None for one. `shard`: replaces the model's parameters by this rank's part of them, in
        place. Raises ConfigError for an unusable loss or adapter.
        """
        self.model, self._config, self._policy, self._ranks = model, config, policy, ranks
        self._surrogate = load_surrogate(policy) if policy.enabled and not policy.by_pairs else None
        if config.lora.enabled:
            lora.add(model, config.lora, text_only=config.freeze_vision)
        elif config.freeze_vision:
            freeze_vision(model)
        shard(model)
        self._forward = TrainerForward(
            model, pad_id=pad_id, row_tokens=row_tokens, micro_batch_tokens=config.micro_batch_tokens, images=images
        )
        self._coord_ids = torch.tensor(list(coord_ids), dtype=torch.long, device=model.device)
        self.optimizer = make_optimizer(model, config)
        self.before_update: Callable[[], None] | None = None  # called where the weights would change

    @property
    def features(self) -> ImageFeatures | None:
        """What the vision tower has computed, and how often; None if there are no images."""
        return self._forward.features

    def prove(self) -> Proof:
        """The start-up proof of the forward pass (see forward.py). Raises ModelError."""
        return self._forward.prove()

    def run(
        self,
        samples: Sequence[TrainingSample],
        step: int,
        *,
        version: int | None = None,
        own: Mapping[str, np.ndarray] | None = None,
        reference: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, float]:
        """Train once on the samples; returns numbers under `train/` keys, and `policy/` ones with a policy loss.

        `train/loss` is the mean cross-entropy, Σ w·CE / Σ w; `version` is that of the weights before this step, None if
        they have none; `own` and `reference` as in `PolicyTerm`. A non-finite gradient skips the update and is counted,
        and so does a part of the batch that trains nothing: the optimiser's momentum would move the weights.
        """
        rate = self._learning_rate(step)
        policy = self._policy
        samples = batch_normalised(samples, policy) if policy.enabled else samples
        parts = minibatches(samples, self._config.minibatches)
        late = [sample for part in parts[1:] for sample in part]
        if late and policy.enabled and policy.mismatch != "none":
            of_late = dict(zip((sample.seq_id for sample in late), self.score(late), strict=True))
        else:
            of_late = None
        scores: dict[str, Any] = {"version": version, "own": own, "reference": reference}
        whole = self._term(samples, **scores)
        ce_sum = geometry_sum = 0.0
        norms: list[float] = []
        for number, part in enumerate(parts):
            term = whole
            if len(parts) > 1:
                moved: dict[str, Any] = {"moved": True, "before": of_late} if number else {}
                term = self._term(part, **scores, **moved)
            if isinstance(term, PairTerm):
                term.prepare(self.score)
            ce, geometry = self._backward(part, term)
            ce_sum, geometry_sum = ce_sum + ce, geometry_sum + geometry
            norms.append(self._update(_trains(part, term)))
            if term is not whole and whole is not None:
                whole.add(cast(Any, term))  # of one kind
        if self._ranks is not None:
            ce_sum, geometry_sum = self._ranks.sum([ce_sum, geometry_sum])
            if isinstance(whole, PolicyTerm):  # pairs are compared by every rank
                whole.gather(self._ranks.sum, self._ranks.largest)
        finite = [norm for norm in norms if math.isfinite(norm)]
        record = {
            "train/loss": ce_sum / _weight(samples),
            "train/geometry_loss": geometry_sum / _boxes(samples),
            "train/learning_rate": rate,
            "train/tokens": float(sum(len(sample.token_ids) for sample in samples)),
            "train/grad_norm": math.fsum(finite) / max(1, len(finite)),
            "train/skipped_updates": float(len(norms) - len(finite)),
        }
        if self._config.minibatches > 1:
            record["train/minibatches"] = float(len(parts))
        return record | ({} if whole is None else whole.record())

    def _term(
        self,
        samples: Sequence[TrainingSample],
        version: int | None,
        own: Mapping[str, np.ndarray] | None,
        reference: Mapping[str, np.ndarray] | None,
        **moved: Any,
    ) -> PolicyTerm | PairTerm | None:
        """The policy's part in the loss of these samples; None if there is none."""
        if not self._policy.enabled:
            return None
        if self._policy.by_pairs:
            return PairTerm(samples, self._policy, reference)
        return PolicyTerm(samples, self._policy, version, self._surrogate, own, reference, **moved)

    def _backward(self, samples: Sequence[TrainingSample], policy: PolicyTerm | PairTerm | None) -> tuple[float, float]:
        """Gradients of the loss of one optimiser batch; its sums of cross-entropy and geometry."""
        divisor, boxes = self._ce_divisor(samples), _boxes(samples)
        ce_sum = geometry_sum = 0.0
        # With tensor parallelism transformers sums some gradients over ranks behind each pass, and what earlier passes
        # left in them once more: each pass starts without.
        parts, others = _parts_and_others(self.model.parameters())
        beside, sums = others if parts else [], dict[torch.nn.Parameter, torch.Tensor]()
        for packed in self._micro_batches(samples):
            ce, geometry, of_policy = self._losses(packed, samples, policy)
            loss = ce / divisor + geometry / boxes + of_policy
            if loss.requires_grad:
                loss.backward()
                for parameter in beside:
                    if (gradient := parameter.grad) is not None:
                        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
                        parameter.grad = None
            ce_sum += float(ce.detach())
            geometry_sum += float(geometry.detach())
        for parameter, gradient in sums.items():
            parameter.grad = gradient
        return ce_sum, geometry_sum

    def _ce_divisor(self, samples: Sequence[TrainingSample]) -> float:
        """N above."""
        return max(1, ce_token_count(samples)) if self._policy.enabled else _weight(samples)

    def score(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """Per sample, the logprob (nats) of each token given those before it, under the current weights.

        At the sample's temperature; shape (len(token_ids),), the first 0. Same packed micro-batches as `run`, in
        evaluation mode.
        """
        scores: list[list[float]] = [[] for _ in samples]
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                for packed in self._micro_batches(samples):
                    logits = self._forward.logits(packed)
                    token_ids = torch.from_numpy(packed.input_ids).to(logits.device)
                    temperatures = temperature_rows(samples, packed, logits.device)
                    logprobs = row_logprobs(logits, token_ids, temperatures).tolist()
                    for place in packed.places:
                        found = logprobs[place.row][place.start : place.start + place.length]
                        scores[place.sample] = [0.0, *found[1:]] if found else []
        finally:
            self.model.train(training)
        return scores if self._ranks is None else _gathered(scores, samples, self._ranks)

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> Iterator[PackedRows]:
        """Of this rank."""
        if self._ranks is None:
            return self._forward.micro_batches(samples)
        return self._forward.micro_batches(samples, self._ranks.rank, self._ranks.size)

    def _update(self, trains: bool) -> float:
        """The norm of the gradient; one that isn't finite makes no update. NaN if nothing `trains`."""
        if not trains:
            self.optimizer.zero_grad(set_to_none=True)
            return math.nan
        norm = _clipped(list(self.model.parameters()), self._config.max_grad_norm)
        if math.isfinite(norm):
            if self.before_update is not None:
                self.before_update()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _learning_rate(self, step: int) -> float:
        rate = learning_rate(self._config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _losses(
        self, packed: PackedRows, samples: Sequence[TrainingSample], policy: PolicyTerm | PairTerm | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._forward.logits(packed)
        labels, weights = (torch.from_numpy(part).to(logits.device) for part in (packed.labels, packed.weights))
        ce = weighted_cross_entropy(logits, labels, weights).sum
        of_policy = logits.nothing() if policy is None else policy.loss(logits, packed)
        return ce, self._geometry(logits, packed, samples), of_policy

    def _geometry(self, logits: RowLogits, packed: PackedRows, samples: Sequence[TrainingSample]) -> torch.Tensor:
        rows: list[int] = []
        positions: list[list[int]] = []
        boxes: list[tuple[int, ...]] = []
        for place in packed.places:
            for target in samples[place.sample].geometry:
                rows.append(place.row)
                positions.append([place.start + position for position in target.positions])
                boxes.append(target.box)
        if not rows:
            return logits.nothing()
        expected = expected_coordinates(
            logits,
            torch.tensor(rows, device=logits.device),
            torch.tensor(positions, device=logits.device),
            self._coord_ids.to(logits.device),
        )
        truth = torch.from_numpy(np.asarray(boxes, dtype=np.float32) / 999.0).to(logits.device)
        config = self._config
        return geometry_loss(expected, truth, config.smooth_l1_weight, config.ciou_weight).sum


def _parts_and_others(
    parameters: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Those of which this rank has a part, and those that it has whole."""
    found: tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] = [], []
    for each in parameters:
        found[not hasattr(each, "full_tensor")].append(each)
    return found


def _clipped(parameters: Sequence[torch.nn.Parameter], limit: float) -> float:
    """Scale the gradients to a norm of at most `limit`; the norm before. torch has no operation on whole tensors and
    parts together, and with tensor parallelism a model has both.
    """
    parts, others = _parts_and_others(parameters)
    if not (parts and others):
        return float(whole(torch.nn.utils.clip_grad_norm_(parameters, limit)))
    grads = [[each.grad for each in some if each.grad is not None] for some in (parts, others)]
    norm = math.hypot(*(float(whole(torch.nn.utils.get_total_norm(some))) for some in grads))
    for some in (parts, others):
        torch.nn.utils.clip_grads_with_norm_(some, limit, torch.tensor(norm))
    return norm


def _trains(samples: Sequence[TrainingSample], policy: PolicyTerm | PairTerm | None) -> bool:
    """Whether the loss of these samples has a term."""
    of_policy = policy is not None and policy.trains
    return of_policy or any(sample.geometry or ce_weights(sample).any() for sample in samples)


def _gathered(scores: Sequence[Sequence[float]], samples: Sequence[TrainingSample], ranks: Ranks) -> list[list[float]]:
    """Each sample's scores are those of the one rank that has them."""
    lengths = [len(sample.token_ids) for sample in samples]
    flat = ranks.sum([value for row, length in zip(scores, lengths, strict=True) for value in row or [0.0] * length])
    ends = np.cumsum(lengths).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _weight(samples: Sequence[TrainingSample]) -> float:
    return max(ce_weight_sum(samples), 1e-8)


def _boxes(samples: Sequence[TrainingSample]) -> int:
    return max(1, sum(len(sample.geometry) for sample in samples))


def minibatches(samples: Sequence[TrainingSample], count: int) -> list[list[TrainingSample]]:
    """`count` parts of about as many samples each; one for each group if there are fewer groups.

    The samples of a group stay together, and the order is that of the batch, so a redone step makes the same parts.
    """
    if count == 1:
        return [list(samples)]
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    count = min(count, len(groups))
    parts: list[list[TrainingSample]] = []
    before = 0
    for number, group in enumerate(groups.values()):
        part = ((2 * before + len(group)) * count - 1) // (2 * len(samples))  # that of the group's middle
        # With groups of very different sizes: no part stays empty, neither before this one nor after the last group.
        part = max(min(part, len(parts)), count - len(groups) + number)
        if part == len(parts):
            parts.append([])
        parts[part] += group
        before += len(group)
    return parts
