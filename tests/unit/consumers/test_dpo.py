"""DPO on the pairs of groups: which pairs, loss and gradient against plain passes in float64, what is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from sluice.consumers.tasks.segments import LeftOut
from sluice.consumers.training.policy.dpo import pair_members, pairs_of, without_proximal
from sluice.consumers.training.policy.proximal import Plan, fill, plan
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import PolicyConfig
from sluice.pipeline.weights.versions import Line
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample, same, train_step, weights_of

DPO = PolicyConfig(enabled=True, loss="dpo", dpo_beta=0.3)
SHAPES: list[dict[str, Any]] = [{}, {"row_tokens": 1, "micro_batch_tokens": 1}]
NAN = math.nan


def answer(name: str, group: str, reward: float | None, length: int = 8, **changes: Any) -> TrainingSample:
    """Two tokens of prompt; one token of the answer was written by a tool."""
    mask = [0, 0, *([1] * (length - 2))]
    mask[4:5] = [0] * (length > 4)
    scores = FloatArray([0.0, 0.0, *([-1.0] * (length - 2))])
    fields: dict[str, Any] = {
        "group_id": group,
        "weights": FloatArray([0.0] * length),
        "logprobs": scores,
        "proximal_logprobs": scores,
        "versions": Runs.of([-1 if not on else 0 for on in mask]),
        "response_mask": Runs.of(mask),
        "reward": reward,
        "advantage": 0.5,
    }
    return replace(random_sample(name, length), **{**fields, **changes})


def names(samples: Sequence[TrainingSample]) -> tuple[list[tuple[str, str]], int]:
    pairs, skipped = pairs_of(samples)
    found = [("+".join(one.seq_id[:-2] for one in side) for side in pair) for pair in pairs]
    return [(best, worst) for best, worst in found], skipped


def test_the_best_and_the_worst_of_each_group() -> None:
    samples = [
        answer("a", "g", 0.5), answer("b", "h", 1.0), answer("c", "g", 2.0), answer("d", "g", -1.0),
        answer("e", "h", 1.0), answer("f", "g", 2.0), answer("k", "i", 0.0),
    ]  # fmt: skip
    assert names(samples) == ([("c", "d")], 2)
    assert names([]) == ([], 0)


def test_what_cannot_be_compared_is_not() -> None:
    """Another one of the group is, where there is one."""
    silent = Runs.of([0] * 8)
    stale: dict[str, Any] = {"left_out": Runs.of([0] * 5 + [LeftOut.stale] + [0] * 2)}
    as_it_came: dict[str, Any] = {"left_out": Runs.of([0] * 4 + [LeftOut.as_it_came] + [0] * 3)}
    samples = [
        answer("a", "g", 9.0, advantage=None), answer("b", "g", 8.0, response_mask=silent), answer("c", "g", None),
        answer("d", "g", 7.0, **stale), answer("e", "g", 3.0, **as_it_came), answer("f", "g", 1.0),
        answer("k", "h", 1.0), answer("l", "h", 2.0, **stale), answer("m", "i", 2.0, advantage=None),
    ]  # fmt: skip
    assert names(samples) == ([("e", "f")], 1)


def test_a_rollout_of_several_parts_is_one_answer() -> None:
    best = [answer(name, "g", 1.0, index=2, parts=2) for name in "ab"]
    assert names([*best, answer("c", "g", 0.0, index=1)]) == ([("a+b", "c")], 0)
    stale = replace(best[1], left_out=Runs.of([0] * 7 + [LeftOut.stale]))
    assert names([best[0], stale, answer("c", "g", 0.0, index=1)]) == ([], 1)


def test_a_rollout_that_lost_a_part_is_no_answer() -> None:
    """Whoever dropped it: the sum over the others would be compared as if it were whole."""
    first, second = (answer(name, "g", 1.0, index=2, parts=2) for name in "ab")
    others = [answer("c", "g", 0.0, index=1), answer("d", "g", 0.5, index=0)]
    for left in (first, second):
        assert names([left, *others]) == ([("d", "c")], 0)
        assert names([left, others[0]]) == ([], 1)
    assert names([first, second, *others]) == ([("a+b", "c")], 0)


def test_a_part_that_is_dropped_as_too_old_takes_its_rollout_along() -> None:
    dropping = replace(DPO, on_stale="drop")
    of_parts = {"group_id": "g", "index": 0, "parts": 2}
    plans: dict[str, Plan] = {}
    for name, versions, reward, fields in (
        ("a", [2, 9], 1.0, of_parts), ("b", [9, 9], 1.0, of_parts), ("c", [9], 0.0, {"index": 1}),
    ):  # fmt: skip
        sample = replace(planned(name, "g", reward, versions).sample, **fields)
        plans[sample.seq_id] = plan(sample, Line.consecutive(9), dropping, own_version=9)
    freed = without_proximal(plans)
    assert fill(freed["a:0"], [], {}, dropping).reason == "stale"
    assert pair_members(freed, dropping) == {}


def planned(name: str, group: str, reward: float, versions: list[int], version: int = 9) -> Plan:
    length = 2 + len(versions)
    sample = answer(
        name, group, reward, length,
        versions=Runs.of([-1] * 2 + versions), response_mask=Runs.of([0] * 2 + [1] * len(versions)),
    )  # fmt: skip
    return plan(sample, Line.consecutive(version), DPO, own_version=version)


def test_nothing_is_asked_but_the_reference_and_of_pairs_alone() -> None:
    plans = {
        one.sample.seq_id: one
        for one in (
            planned("a", "g", 1.0, [9, 8, 6]), planned("b", "g", 0.0, [7, 7]), planned("c", "g", 0.5, [9]),
            planned("d", "h", 1.0, [9]), planned("e", "h", 1.0, [9]), planned("f", "g", 5.0, [2]),
        )
    }  # fmt: skip
    freed = without_proximal(plans)
    assert not any(one.recompute.any() or one.ask.any() for one in freed.values())
    assert list(pair_members(freed, DPO)) == ["a:0", "b:0"]  # f is too old
    filled = fill(freed["a:0"], [], {}, DPO)
    assert filled.sample is not None
    assert filled.sample.response_mask.expand() == [0, 0, 1, 1, 1]
    assert (filled.counts.missing, filled.counts.stale) == (0, 0)
    assert fill(freed["f:0"], [], {}, DPO).counts.stale == 1


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def batch(temperature: float = 1.0) -> list[TrainingSample]:
    """Two pairs of four in a group, one of two, and a group that agrees."""
    rewards = {"g": (0.0, 1.0, 0.3, 0.9), "h": (2.0, -1.0, 0.0, 0.5), "i": (0.1, 0.2), "k": (1.0, 1.0)}
    return [
        answer(f"{group}{at}", group, reward, 8 + 3 * at, temperature=temperature)
        for group, members in rewards.items()
        for at, reward in enumerate(members)
    ]


PAIRS = [("g1", "g0"), ("h0", "h1"), ("i1", "i0")]


def scores_of(samples: Sequence[TrainingSample]) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(4)
    return {one.seq_id: -5 + drawn.normal(size=len(one.token_ids)) for one in samples}


def total(model: Any, sample: TrainingSample) -> torch.Tensor:
    """Of the trained tokens, from one plain pass, float64 with gradient."""
    ids, on = torch.tensor(list(sample.token_ids)), torch.tensor(sample.response_mask.expand()).bool()[1:]
    logprobs = (model(input_ids=ids[None]).logits[0, :-1].double() / sample.temperature).log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[:, 0][on].sum()


def by_hand(
    model: Any, samples: Sequence[TrainingSample], scores: dict[str, np.ndarray], pairs: Sequence[tuple[str, str]]
) -> tuple[torch.Tensor, list[float]]:
    """The loss, and the margins."""
    named = {one.seq_id[:-2]: one for one in samples}
    margins = []
    for pair in pairs:
        apart = []
        for one in (named[name] for name in pair):
            on = np.array(one.response_mask.expand()) == 1
            apart.append(total(model, one) - float(scores[one.seq_id][on].sum()))
        margins.append(0.3 * (apart[0] - apart[1]))
    loss = torch.stack([-(1 / (1 + (-margin).exp())).log() for margin in margins]).mean()
    return loss, [margin.item() for margin in margins]


def gradients(step: TrainStep) -> dict[str, torch.Tensor]:
    named = step.model.named_parameters()
    return {name: value.grad.clone() for name, value in named if value.grad is not None}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradient_are_those_of_plain_passes(source: Path, shape: dict[str, Any], temperature: float) -> None:
    step = train_step(source, policy=DPO, learning_rate=0.0, max_grad_norm=1e9, **shape)
    samples = batch(temperature)
    scores = scores_of(samples)
    wanted, margins = by_hand(step.model, samples, scores, PAIRS)
    step.model.zero_grad()
    wanted.backward()
    expected = gradients(step)
    step.model.zero_grad()
    seen: dict[str, torch.Tensor] = {}
    step.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(step)))
    record = step.run(samples, 1, version=0, reference=scores)
    assert record["policy/loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert record["policy/dpo_margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    assert record["policy/dpo_accuracy"] == np.mean(np.array(margins) > 0)
    lengths = [8 + 3 * int(name[1]) - 3 for pair in PAIRS for name in pair]
    assert {key: record[f"policy/{key}"] for key in ("dpo_pairs", "dpo_skipped_groups", "tokens")} == {
        "dpo_pairs": 3, "dpo_skipped_groups": 1, "tokens": sum(lengths),
    }  # fmt: skip
    assert record["policy/reward_mean"] == pytest.approx(np.mean([one.reward or 0.0 for one in samples]))
    assert (record["policy/dpo_unscored_pairs"], record["policy/missing_reference_tokens"]) == (0, 0)
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, rtol=2e-3, atol=1e-5)


def test_a_pair_with_a_token_that_has_no_score_is_left_out_and_counted(source: Path) -> None:
    samples = batch()
    scores = scores_of(samples)
    scores["g0:0"][5] = NAN
    scores["h0:0"][4] = NAN  # a tool's
    del scores["i0:0"]
    step = train_step(source, policy=DPO, learning_rate=0.0)
    wanted, _ = by_hand(step.model, samples, scores, PAIRS[1:2])
    record = step.run(samples, 1, reference=scores)
    assert record["policy/loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert (record["policy/dpo_pairs"], record["policy/dpo_unscored_pairs"]) == (1, 2)
    assert record["policy/missing_reference_tokens"] == 1 + 5


def test_no_pair_at_all_trains_nothing(source: Path) -> None:
    step = train_step(source, policy=DPO)
    start = weights_of(step)
    record = step.run([one for one in batch() if one.group_id == "k"], 1, reference={})
    assert same(weights_of(step), start)
    assert (record["policy/loss"], record["policy/dpo_pairs"], record["policy/dpo_skipped_groups"]) == (0, 0, 1)
    assert not {"policy/dpo_margin", "policy/dpo_accuracy"} & record.keys()


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_part_without_a_pair_leaves_the_weights_to_the_others(source: Path, minibatches: int) -> None:
    """A step on zeros would follow the momentum of those before."""
    samples = batch()
    scores = scores_of(samples)
    step = train_step(source, policy=DPO, learning_rate=3e-3, minibatches=minibatches)
    step.run(samples, 1, reference=scores)
    before = weights_of(step)
    bare = [replace(one, reward=1.0) for one in samples]
    record = step.run(bare, 2, reference=scores)
    assert same(weights_of(step), before)
    assert (record["train/skipped_updates"], record["train/grad_norm"]) == (minibatches, 0.0)
    step.run([replace(one, weights=FloatArray([0.0, *[1.0] * (len(one.token_ids) - 1)])) for one in bare], 3)
    assert not same(weights_of(step), before), "cross-entropy is a reason of its own"


def test_two_minibatches_are_two_steps_and_one_record(source: Path) -> None:
    samples = batch()
    scores = scores_of(samples)
    step = train_step(source, policy=DPO, learning_rate=3e-3, minibatches=2)
    apart = train_step(source, policy=DPO, learning_rate=3e-3)
    record = step.run(samples, 1, reference=scores)
    cut = next(at for at, one in enumerate(samples) if one.group_id == "i")
    parts = [apart.run(part, 1, reference=scores) for part in (samples[:cut], samples[cut:])]
    for one in (record, *parts):
        one.pop("train/minibatches", None)
    whole = step.run(samples, 1, reference=scores)
    assert whole.keys() == parts[0].keys() | {"train/minibatches"}
    pairs = [one["policy/dpo_pairs"] for one in parts]
    assert record["policy/dpo_pairs"] == sum(pairs) == 3
    for key in ("policy/loss", "policy/dpo_margin", "policy/dpo_accuracy"):
        assert record[key] == pytest.approx(np.average([one[key] for one in parts], weights=pairs))


def test_it_learns_to_prefer_the_better_answers(source: Path) -> None:
    samples = batch()
    step = train_step(source, policy=DPO, learning_rate=1e-3)
    scores = dict(zip((one.seq_id for one in samples), map(np.array, step.score(samples)), strict=True))
    records = [step.run(samples, number, reference=scores) for number in range(1, 9)]
    assert records[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert records[-1]["policy/loss"] < 0.6
    assert records[-1]["policy/dpo_accuracy"] == 1
