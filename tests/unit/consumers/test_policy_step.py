"""The policy loss inside an optimiser step: against plain forward passes and the float64 reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from sluice.consumers.audit.replay import STEP_VALUES
from sluice.consumers.training import row_logits
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.policy_reference import Reference, Token, reference
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, same, train_step, weights_of

POLICY = PolicyConfig(enabled=True, clip_eps=0.15, clip_eps_high=0.25, dual_clip=1.35)
NO_CLIPPING = 1e9
SHAPES: list[dict[str, Any]] = [
    {},
    {"micro_batch_tokens": 1},  # a row a pass
    {"row_tokens": 1},  # a sample a row
    {"row_tokens": 1, "micro_batch_tokens": 1},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def plain_logprobs(step: TrainStep, sample: TrainingSample) -> torch.Tensor:
    """One sample alone, no packing, at its temperature: float [L], with gradient; 0 first."""
    ids = torch.tensor([list(sample.token_ids)])
    logprobs = (step.model(input_ids=ids).logits[0, :-1].double() / sample.temperature).log_softmax(-1)
    return torch.cat([torch.zeros(1, dtype=torch.float64), logprobs.gather(1, ids[0, 1:, None])[:, 0]])


def policy_sample(step: TrainStep, name: str, length: int, advantage: float | None, **changes: Any) -> TrainingSample:
    """Scores around the model's own, one token above the cap, one below the floor, one that was not sampled."""
    sample = replace(random_sample(name, length), temperature=changes.get("temperature", 1.0))
    logp, drawn = plain_logprobs(step, sample).tolist(), random.Random(name)
    proximal = [value + drawn.uniform(-0.5, 0.5) for value in logp]
    behaviour = [value + drawn.uniform(-0.4, 0.4) for value in proximal]
    behaviour[5], behaviour[6] = proximal[5] - 2.5, proximal[6] + 2.5
    fields: dict[str, Any] = {
        "labels": TokenArray((token + 1) % 256 for token in sample.token_ids),
        "weights": FloatArray([0.0] * length),
        "logprobs": FloatArray(behaviour),
        "proximal_logprobs": FloatArray(proximal),
        "versions": Runs.of([3] * 5 + [4] * (length - 5)),
        "proximal_versions": Runs.of([4] * 5 + [5] * (length - 5)),
        "response_mask": Runs.of([1, 0, 1, 1, 0] + [1] * (length - 5)),  # of the first token there is no logprob
        "reward": 1.0 if advantage is None else advantage + 1,
        "advantage": advantage,
    }
    return replace(sample, **{**fields, **changes})


def batch(step: TrainStep) -> list[TrainingSample]:
    """Policy alone, teacher-forced alone, both at once, neither."""
    both = random_sample("both", 20).weights
    return [
        policy_sample(step, "good", 14, 1.2),
        random_sample("taught", 11),
        policy_sample(step, "bad", 24, -0.8, temperature=0.7),
        policy_sample(step, "both", 20, 0.5, weights=both),
        policy_sample(step, "unrewarded", 9, None),
    ]


def in_the_loss(sample: TrainingSample) -> list[bool]:
    on = [value == 1 for value in sample.response_mask] or [False] * len(sample.token_ids)
    return [False, *on[1:]] if sample.advantage is not None else [False] * len(on)


def expected(step: TrainStep, samples: list[TrainingSample]) -> tuple[Reference, dict[str, torch.Tensor]]:
    """The policy's sums, and the gradient of the whole loss, from one plain forward pass a sample."""
    logps = [plain_logprobs(step, sample) for sample in samples]
    tokens: list[Token] = []
    for sample, logp in zip(samples, logps, strict=True):
        nothing = [0.0] * len(logp)
        proximal, behaviour = sample.proximal_logprobs or nothing, sample.logprobs or nothing
        advantages = [sample.advantage or 0.0] * len(logp)
        tokens += zip(logp.tolist(), proximal, behaviour, advantages, strict=True)
    found, slopes = reference(tokens, [on for sample in samples for on in in_the_loss(sample)], POLICY)
    policy = (torch.cat(logps) * torch.from_numpy(slopes)).sum() / found.tokens
    total = sum(sum(1 for weight in sample.weights if weight) for sample in samples)
    taught = sum((plain_cross_entropy(step, sample) for sample in samples), torch.zeros(()))
    step.model.zero_grad()
    (policy + taught / total).backward()
    gradient = {name: value.grad.clone() for name, value in step.model.named_parameters() if value.grad is not None}
    step.model.zero_grad()
    return found, gradient


def plain_cross_entropy(step: TrainStep, sample: TrainingSample) -> torch.Tensor:
    logprobs = step.model(input_ids=torch.tensor([list(sample.token_ids)])).logits[0, :-1].double().log_softmax(-1)
    picked = logprobs.gather(1, torch.tensor(list(sample.labels))[1:, None])[:, 0]
    return -(picked * torch.tensor(list(sample.weights))[1:]).sum()


def test_the_weight_of_right_answers_scales_their_cross_entropy(source: Path) -> None:
    """Twice the weight adds twice the gradient; train/loss is the mean before it."""
    found: list[tuple[float, torch.Tensor]] = []
    for weight in (0.0, 0.25, 0.5):
        step = train_step(source, policy=POLICY, max_grad_norm=NO_CLIPPING)
        right = FloatArray([0.0, 0.0] + [weight] * 12)
        samples = [policy_sample(step, "right", 14, 0.8, weights=right), policy_sample(step, "wrong", 9, -0.8)]
        record, gradient = run(step, samples)
        found.append((record["train/loss"], torch.cat([gradient[name].flatten() for name in sorted(gradient)])))
    (_, without), (loss, once), (same_loss, twice) = found
    assert same_loss == pytest.approx(loss)
    torch.testing.assert_close(twice - without, 2 * (once - without), rtol=1e-4, atol=1e-6)
    assert float((once - without).abs().max()) > 1e-3


def run(step: TrainStep, samples: list[TrainingSample], **options: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """The record, and the gradient that the optimiser was given."""
    seen: dict[str, Any] = {}

    def look(*_: object) -> None:
        seen.update(
            {name: value.grad.clone() for name, value in step.model.named_parameters() if value.grad is not None}
        )

    handle = step.optimizer.register_step_pre_hook(look)
    record = step.run(samples, 1, **options)
    handle.remove()
    return record, seen


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient_are_those_of_plain_passes(source: Path, shape: dict[str, Any]) -> None:
    step = train_step(source, policy=POLICY, max_grad_norm=NO_CLIPPING, **shape)
    samples = batch(step)
    wanted, gradient = expected(step, samples)
    record, got = run(step, samples)
    assert min(wanted.clipped, wanted.dual_clipped, wanted.capped, wanted.floored) > 0
    assert {key: record[f"policy/{key}"] for key in ("tokens", "capped_tokens", "floored_tokens")} == {
        "tokens": wanted.tokens,
        "capped_tokens": wanted.capped,
        "floored_tokens": wanted.floored,
    }
    means = {
        "policy/loss": wanted.loss / wanted.tokens,
        "policy/importance_weight": wanted.importance_weight / wanted.tokens,
        "policy/approx_kl": wanted.approx_kl / wanted.tokens,
        "policy/clip_ratio": wanted.clipped / wanted.tokens,
        "policy/dual_clip_ratio": wanted.dual_clipped / wanted.tokens,
        "policy/behaviour_importance_weight": wanted.behaviour_weight / wanted.kept,
        "policy/behaviour_kl": wanted.behaviour_kl / wanted.tokens,
        "policy/reward_mean": np.mean([2.2, 0.2, 1.5]),
        "policy/advantage_std": np.std([1.2, -0.8, 0.5]),
    }
    assert {key: record[key] for key in means} == pytest.approx(means, rel=1e-4, abs=1e-5)
    assert got.keys() == gradient.keys()
    for name, value in gradient.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("odd", [0.0, -80.0, float("nan")])
def test_a_rollout_of_several_turns_is_its_sampled_tokens_alone(source: Path, odd: float) -> None:
    """Whatever stands at the tokens of tools: no ratio, no gradient, no part in the gap to the engine."""
    step = train_step(source, policy=POLICY, max_grad_norm=NO_CLIPPING)
    on = np.array([0] * 4 + [1] * 5 + [0] * 3 + [1] * 4 + [0] * 2 + [1] * 3, dtype=bool)
    whole = policy_sample(step, "turns", len(on), -0.7)
    logp = plain_logprobs(step, whole)
    proximal, behaviour = np.array(whole.proximal_logprobs), np.array(whole.logprobs)
    sample = replace(
        whole,
        response_mask=Runs.of(on.astype(int).tolist()),
        versions=Runs.of(np.where(on, 4, -1).tolist()),
        proximal_versions=Runs.of(np.where(on, 5, -1).tolist()),
        proximal_logprobs=FloatArray(np.where(on, proximal, odd)),
        logprobs=FloatArray(np.where(on, behaviour, odd)),
        prompt_len=4,
    )
    places = np.flatnonzero(on)
    values = logp.tolist()
    tokens = [(values[at], float(proximal[at]), float(behaviour[at]), -0.7) for at in places]
    wanted, slopes = reference(tokens, [True] * len(tokens), POLICY)
    step.model.zero_grad()
    ((logp[places] * torch.from_numpy(slopes)).sum() / len(tokens)).backward()
    gradient = {name: value.grad.clone() for name, value in step.model.named_parameters() if value.grad is not None}
    step.model.zero_grad()
    record, got = run(step, [sample], version=4)
    assert record["policy/tokens"] == len(tokens) == 12
    assert record["policy/loss"] == pytest.approx(wanted.loss / len(tokens), rel=1e-4)
    assert record["policy/approx_kl"] == pytest.approx(wanted.approx_kl / len(tokens), rel=1e-3)
    gaps = [abs(token[0] - token[2]) for token in tokens]
    assert record["policy/engine_logprob_gap_mean"] == pytest.approx(np.mean(gaps), rel=1e-4)
    assert got.keys() == gradient.keys()
    for name, value in gradient.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5)


def test_the_cross_entropy_is_reported_as_without_a_policy_loss(source: Path) -> None:
    step, off = train_step(source, policy=POLICY), train_step(source)
    samples = batch(step)
    record, plain = step.run(samples, 1), off.run(samples, 1)
    assert record["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-6)
    assert not [key for key in plain if key.startswith("policy/")]
    assert not same(weights_of(step), weights_of(off))


def test_a_record_has_what_a_replay_shows_of_its_step(source: Path) -> None:
    step = train_step(source, policy=POLICY)
    assert set(STEP_VALUES) <= step.run(batch(step), 1).keys()


def test_without_an_advantage_there_is_no_policy_loss(source: Path) -> None:
    step = train_step(source, policy=POLICY)
    before = weights_of(step)
    samples = [policy_sample(step, name, 12, None) for name in "ab"]
    record = step.run(samples, 1)
    assert (record["policy/tokens"], record["policy/loss"], record["policy/advantage_std"]) == (0, 0, 0)
    assert same(before, weights_of(step))


def test_a_mask_without_a_token_needs_no_scores(source: Path) -> None:
    step = train_step(source, policy=POLICY)
    silent = replace(random_sample("s", 9), advantage=1.0, response_mask=Runs.of([1] + [0] * 8))
    assert step.run([silent], 1)["policy/tokens"] == 0


@pytest.mark.parametrize("name", ["response_mask", "logprobs", "proximal_logprobs"])
def test_a_missing_array_is_named(source: Path, name: str) -> None:
    step = train_step(source, policy=POLICY)
    empty: Any = Runs() if name == "response_mask" else FloatArray()
    with pytest.raises(MessageError, match=f"s:0 has an advantage .* but no {name};"):
        step.run([replace(policy_sample(step, "s", 12, 1.0), **{name: empty})], 1)


@pytest.mark.parametrize("garbage", [0.0, -77.0, 3.5, float("nan"), float("inf")])
@pytest.mark.parametrize("claimed", [-1, 3, 4])  # marked as not scored, or a score of no later version
def test_the_loss_reads_no_proximal_logprob_of_a_marked_token(source: Path, garbage: float, claimed: int) -> None:
    step = train_step(source, policy=POLICY)
    whole = policy_sample(step, "s", 14, 1.2)
    behaviour, scored = list(whole.logprobs), list(whole.proximal_logprobs)
    marked = [at for at in range(7, 14, 2)]
    versions = [claimed if at in marked else version for at, version in enumerate(whole.proximal_versions)]

    def sample(values: list[float]) -> TrainingSample:
        return replace(whole, proximal_logprobs=FloatArray(values), proximal_versions=Runs.of(versions))

    clean = [behaviour[at] if at in marked else scored[at] for at in range(14)]
    spoilt = [garbage if at in marked else scored[at] for at in range(14)]
    wanted, gradient = run(train_step(source, policy=POLICY), [sample(clean)])
    record, got = run(train_step(source, policy=POLICY), [sample(spoilt)])
    assert record == wanted
    assert same(got, gradient)


def test_the_gap_to_the_engine_is_over_tokens_of_this_version(source: Path) -> None:
    step = train_step(source, policy=POLICY, learning_rate=0.0)
    sample = policy_sample(step, "s", 12, 1.0)
    logp = plain_logprobs(step, sample).tolist()
    gaps = [abs(logp[at] - sample.logprobs[at]) for at in range(5, 12)]
    record = step.run([sample], 1, version=4)
    assert record["policy/engine_logprob_gap_mean"] == pytest.approx(np.mean(gaps), rel=1e-4)
    assert record["policy/engine_logprob_gap_max"] == pytest.approx(2.5, abs=1.0)
    assert record["policy/engine_logprob_gap_max"] == pytest.approx(max(gaps), rel=1e-4)
    for version in (None, 7):  # nothing was measured, which is not agreement
        assert not [key for key in step.run([sample], 1, version=version) if "gap" in key]


def test_a_policy_gradient_that_is_not_finite_skips_the_update(source: Path) -> None:
    step = train_step(source, policy=PolicyConfig(enabled=True))
    far = FloatArray([-400.0] * 12)
    sample = policy_sample(step, "s", 12, -1.0, logprobs=far, proximal_logprobs=far)
    before = weights_of(step)
    record = step.run([sample, random_sample("taught", 11)], 1)
    assert record["train/skipped_updates"] == 1.0
    assert same(before, weights_of(step))


def test_what_did_better_becomes_likelier(source: Path) -> None:
    step = train_step(source, policy=PolicyConfig(enabled=True), learning_rate=1e-3)
    good, bad = (random_sample(name, 16) for name in ("good", "bad"))
    before = [sum(scores) for scores in step.score([good, bad])]
    for number in range(1, 5):
        scored = []
        for sample, advantage in ((good, 1.0), (bad, -1.0)):
            [scores] = step.score([sample])
            now = FloatArray(scores)
            scored.append(policy_sample(step, "x", 16, advantage, token_ids=sample.token_ids,
                                        logprobs=now, proximal_logprobs=now))  # fmt: skip
        step.run(scored, number)
    after = [sum(scores) for scores in step.score([good, bad])]
    assert after[0] > before[0] + 1
    assert after[1] < before[1] - 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_are_those_of_plain_passes(source: Path, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_logits, "_AT_ONCE", 7 * 263)  # pieces that end inside rows
    step = train_step(source, **shape)
    samples = [random_sample(f"s{at}", length) for at, length in enumerate((9, 30, 17, 2, 24, 12))]
    samples = [replace(sample, temperature=1.0 + at % 3) for at, sample in enumerate(samples)]
    got = step.score(samples)
    assert [len(scores) for scores in got] == [9, 30, 17, 2, 24, 12]
    for sample, scores in zip(samples, got, strict=True):
        assert scores == pytest.approx(plain_logprobs(step, sample).tolist(), abs=1e-4)
        assert scores[0] == 0.0
    assert all(parameter.grad is None for parameter in step.model.parameters())


def drop_out(step: TrainStep) -> None:
    for layer in step.model.model.layers:
        layer.self_attn.attention_dropout = 0.5


@pytest.mark.parametrize("training", [True, False])
def test_scoring_is_without_dropout_and_leaves_the_mode(source: Path, training: bool) -> None:
    step = train_step(source)
    samples = [random_sample("s", 20)]
    calm = step.score(samples)
    drop_out(step)
    step.model.train(training)
    assert step.score(samples) == calm
    assert step.model.training is training


def test_the_mode_is_restored_when_scoring_fails(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = train_step(source)
    broken: Callable[..., Any] = lambda *_: (_ for _ in ()).throw(RuntimeError("cut off"))  # noqa: E731
    monkeypatch.setattr("sluice.consumers.training.step.row_logprobs", broken)
    with pytest.raises(RuntimeError, match="cut off"):
        step.score([random_sample("s", 20)])
    assert step.model.training
