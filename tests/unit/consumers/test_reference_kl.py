"""The KL to a frozen reference: a float64 reference, plain passes of two models, and who scores which token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.consumers.training.policy.loss import policy_loss
from sluice.consumers.training.policy.proximal import Plan, plan
from sluice.consumers.training.policy.reference import is_the_trainers, reference_jobs, reference_scores
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.queue.scores import refusal
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.messages import ScoreResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, train_step

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")
NAN = math.nan
LENGTHS = (9, 21, 14)


def by_hand(logp: float, reference: float, estimator: Estimator) -> tuple[float, float]:
    """The estimate and its slope in logp."""
    apart = logp - reference
    if estimator == "k1":
        return apart, 1.0
    if estimator == "k2":
        return apart * apart / 2, apart
    return math.exp(-apart) - 1 + apart, 1 - math.exp(-apart)


LOGS = st.integers(-40, 0).map(lambda eighths: eighths / 8)
TOKENS = st.tuples(LOGS, LOGS, st.sampled_from([0.0, 2.0, -2.0]), st.booleans(), st.booleans(), st.floats(0.1, 2.0))


@settings(deadline=None)
@given(st.lists(TOKENS, max_size=16), st.sampled_from(ESTIMATORS))
def test_values_and_gradients_are_those_of_the_reference(drawn: list[Any], estimator: Estimator) -> None:
    """Tokens beyond cap and floor, masked ones and those without a score are not in the term."""
    logp = torch.tensor([one[0] for one in drawn], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([one[1] if one[4] else NAN for one in drawn], dtype=torch.float64)
    behaviour = torch.tensor([one[0] - one[2] for one in drawn], dtype=torch.float64)  # w is 1, e² or e⁻²
    mask = torch.tensor([one[3] for one in drawn], dtype=torch.bool)
    shares = torch.tensor([one[5] for one in drawn], dtype=torch.float64)
    kl, metric, slopes, missing, held = 0.0, 0.0, [], 0, 0
    for log, under, moved, on, scored, share in drawn:
        kept = on and not moved
        missing += kept and not scored
        if not (kept and scored):
            slopes.append(0.0)
            continue
        value, slope = by_hand(log, under, estimator)
        kl, held, metric = kl + share * value, held + 1, metric + by_hand(log, under, "k3")[0]
        slopes.append(share * slope)
    sums = policy_loss(
        logp, logp.detach(), behaviour, torch.ones_like(logp), mask, PolicyConfig(kl_estimator=estimator),
        shares=shares, reference=reference,
    )  # fmt: skip
    sums.kl.backward()
    assert logp.grad is not None
    assert (sums.referenced, sums.unreferenced) == (held, missing)
    assert sums.kl.item() == pytest.approx(kl, rel=1e-9, abs=1e-12)
    assert sums.reference_kl.item() == pytest.approx(metric, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(logp.grad, slopes, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradients_of_the_estimators_are_those_that_the_table_names(estimator: Estimator) -> None:
    """Over every token of a small vocabulary, weighed by how often it is sampled."""
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=drawn, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, generator=drawn, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    chances = logp.detach().exp()
    on = torch.ones(7, dtype=torch.bool)
    sums = policy_loss(
        logp, logp.detach(), logp.detach(), 0 * logp.detach(), on, PolicyConfig(kl_estimator=estimator),
        shares=chances, reference=reference,
    )  # fmt: skip
    [got] = torch.autograd.grad(sums.kl, logits, retain_graph=True)
    to_reference = (logp.exp() * (logp - reference)).sum()
    from_reference = (reference.exp() * (reference - logp)).sum()
    wanted = {"k1": 0 * to_reference, "k2": to_reference, "k3": from_reference}[estimator]
    torch.testing.assert_close(got, torch.autograd.grad(wanted, logits)[0])
    if estimator != "k2":  # biased
        assert sums.kl.item() == pytest.approx(to_reference.item())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def logprobs_of(model: Any, sample: TrainingSample) -> torch.Tensor:
    """float64 [T - 1], of each token after the first, from one plain pass; with gradient."""
    ids = torch.tensor(list(sample.token_ids))
    logits = model(input_ids=ids[None]).logits[0, :-1].double() / sample.temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def other_model(step: TrainStep, source: Path) -> Any:
    """The reference: the same model, moved a little."""
    model = train_step(source).model
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.02 * torch.randn(value.shape, generator=drawn)
    return model


def on_policy(step: TrainStep, name: str, length: int, **changes: Any) -> TrainingSample:
    """Sampled by version 6; the first two tokens are prompt, and the advantage is 0: the KL alone has a gradient."""
    plain = replace(random_sample(name, length), **changes)
    logprobs = FloatArray([0.0, *logprobs_of(step.model, plain).tolist()])
    return replace(
        plain,
        weights=FloatArray([0.0] * length),
        logprobs=logprobs,
        proximal_logprobs=logprobs,
        versions=Runs.of([-1] * 2 + [6] * (length - 2)),
        response_mask=Runs.of([0] * 2 + [1] * (length - 2)),
        advantage=0.0,
        reward=1.0,
    )


@pytest.mark.parametrize("shape", [{}, {"row_tokens": 1, "micro_batch_tokens": 1}], ids=str)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_step_against_plain_passes_of_both_models(
    source: Path, shape: dict[str, Any], aggregation: Any, estimator: Estimator
) -> None:
    """The mean is the loss's own. A token without a score is in N, as in the loss, and adds nothing."""
    policy = PolicyConfig(
        enabled=True, kl_coef=0.5, kl_estimator=estimator, aggregation=aggregation, aggregation_tokens=32
    )
    step = train_step(source, policy=policy, learning_rate=0.0, max_grad_norm=1e9, **shape)
    other = other_model(step, source)
    samples = [on_policy(step, str(at), length, temperature=0.8) for at, length in enumerate(LENGTHS)]
    scores = {one.seq_id: np.array([NAN, *logprobs_of(other, one).tolist()]) for one in samples}
    scores[samples[1].seq_id][5:9] = NAN
    del scores[samples[2].seq_id]  # nobody scored it
    parts, metric = [], []
    for one in samples:
        if one.seq_id not in scores:
            continue
        under = torch.from_numpy(scores[one.seq_id])[3 - 1 :]
        d = (logprobs_of(step.model, one)[1:] - under)[under.isfinite()]
        value = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[estimator]
        metric += ((-d).exp() - 1 + d).tolist()
        parts.append(value.sum() / (len(one.token_ids) - 2 if aggregation == "sequence" else 1))
    divisor = {"token": sum(LENGTHS) - 6, "sequence": 3, "constant": 3 * 32}[aggregation]
    wanted = torch.stack(parts).sum() / divisor
    step.model.zero_grad()
    (0.5 * wanted).backward()
    gradient = {name: value.grad.clone() for name, value in step.model.named_parameters() if value.grad is not None}
    step.model.zero_grad()
    seen: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        named = step.model.named_parameters()
        seen.update({name: value.grad.clone() for name, value in named if value.grad is not None})

    step.optimizer.register_step_pre_hook(look)
    record = step.run(samples, 1, version=6, reference=scores)
    assert record["policy/kl_loss"] == pytest.approx(wanted.item(), rel=1e-4)
    assert record["policy/kl_reference"] == pytest.approx(np.mean(metric), rel=1e-3)
    assert record["policy/missing_reference_tokens"] == 4 + LENGTHS[2] - 2
    assert seen.keys() == gradient.keys()
    for name, value in gradient.items():
        torch.testing.assert_close(seen[name], value, rtol=2e-3, atol=1e-5)


def test_without_a_coefficient_nothing_is_reported(source: Path) -> None:
    step = train_step(source, policy=PolicyConfig(enabled=True))
    record = step.run([on_policy(step, "a", 9)], 1, version=6)
    assert not [key for key in record if "kl_reference" in key or "reference_tokens" in key or "kl_loss" in key]


def test_without_a_score_there_is_no_mean(source: Path) -> None:
    step = train_step(source, policy=PolicyConfig(enabled=True, kl_coef=0.1))
    record = step.run([on_policy(step, "a", 9)], 1, version=6)
    assert "policy/kl_reference" not in record
    assert (record["policy/kl_loss"], record["policy/missing_reference_tokens"]) == (0, 7)


def planned(version: int, versions: list[int], **policy: Any) -> Plan:
    """Two tokens of prompt, then a token of each version."""
    length = 2 + len(versions)
    sample = replace(
        random_sample("s", length),
        logprobs=FloatArray([0.0] * 2 + [-1.0] * len(versions)),
        versions=Runs.of([-1] * 2 + versions),
        response_mask=Runs.of([0] * 2 + [int(one >= 0) for one in versions]),
        advantage=1.0,
        temperature=0.9,
    )
    line = Line.consecutive(version)
    return plan(sample, line, PolicyConfig(enabled=True, **policy), own_version=version)


def answer(positions: list[int], logprobs: list[float], version: int) -> ScoreResult:
    return ScoreResult(
        seq_id="s:0", scored_version=version, positions=TokenArray(positions), logprobs=FloatArray(logprobs)
    )


def test_every_token_that_may_be_trained_is_asked_for() -> None:
    """Not what nobody sampled, nor what is too old; a sample that is dropped isn't scored at all."""
    [job] = reference_jobs([planned(7, [1, 6, -1, 7, 3])], 0, "r")
    assert (job.version, list(job.positions), job.temperature) == (0, [1, 3, 4], 0.9)
    assert list(job.sampled) == [1, 1, 0, 1, 1]
    assert reference_jobs([planned(7, [1, 6], on_stale="drop")], 0, "r") == []
    assert reference_jobs([planned(7, [-1])], 0, "r") == []
    assert reference_jobs([planned(7, [6])], None, "r") == []


def test_scores_of_another_version_or_place_are_not_used() -> None:
    one = planned(7, [1, 6, -1, 7, 3])
    answers = [
        answer([1, 3], [-0.5, -0.25], 0),
        answer([4], [-9.0], 4),  # a proximal score
        answer([0, 2, 9], [-9.0, -9.0, -9.0], 0),  # too old, not sampled, not there
        refusal("s:0", 0, "gone"),
    ]
    found = reference_scores({"s:0": one}, 0, {}, {"s:0": answers})["s:0"]
    np.testing.assert_array_equal(found, [NAN, NAN, NAN, -0.5, NAN, -0.25, NAN])


def test_where_the_trainers_weights_are_the_reference_it_scores_itself() -> None:
    one = planned(7, [6, 7])
    assert is_the_trainers(one, 7)
    assert not is_the_trainers(one, 6)
    assert not is_the_trainers(planned(7, [-1]), 7)
    assert reference_jobs([one], 7, "r") == []
    found = reference_scores({"s:0": one}, 7, {"s:0": [0.0, -1.0, -2.0, -3.0]}, {})["s:0"]
    np.testing.assert_array_equal(found, [NAN, NAN, -2.0, -3.0])
