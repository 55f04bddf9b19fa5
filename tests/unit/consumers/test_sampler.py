"""A group's samples, and a reason for every member that gives none."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from sluice.consumers.groups import Group
from sluice.consumers.samples import Sampler, image_token_of
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.registry import load_task
from sluice.consumers.tasks.segments import LeftOut
from sluice.consumers.tasks.task import Matched, Parsed, Task, TaskContext
from sluice.pipeline.config.types import ConsumerConfig, ModelConfig, PolicyConfig, RolloutMatchingConfig
from sluice.pipeline.wire.messages import (
    DeadLetter,
    ImageRef,
    Reshaped,
    SamplingParams,
    SequenceResult,
    TrainingSample,
)
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import sequence_result, training_sample
from tests.tiny_tokenizer import tiny_codec

TASK = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)
CONTEXT = TaskContext(tiny_codec("bytes"), RolloutMatchingConfig(task="exact_answer"))


def sampler(task: Task = TASK, image_token_id: int | None = None, **options: object) -> Sampler:
    return Sampler(task, CONTEXT, ConsumerConfig(**options), image_token_id)  # type: ignore[arg-type]


def group(*members: SequenceResult | DeadLetter, size: int | None = None) -> Group:
    """Whole; a dead member whose state is `dropped` ended in the consumer."""
    places = {(at, 0) if isinstance(one, DeadLetter) else (one.index, one.part): one for at, one in enumerate(members)}
    own = [one for one in members if isinstance(one, DeadLetter) and one.state == "dropped"]
    return Group("g", size or len(members), places, [str(at) for at in range(len(members))], unrecorded=own)


def result(index: int = 0, size: int = 1, **changes: object) -> SequenceResult:
    return sequence_result("g", index, size, truth="seven", task="exact_answer", **changes)


def test_a_step_that_raises_is_a_drop_with_its_traceback() -> None:
    def broken(result: SequenceResult, ctx: TaskContext) -> Parsed:
        raise KeyError("boom")

    samples, [letter] = sampler(replace(TASK, parse=broken)).samples_of(group(result()))
    assert samples == []
    assert letter.reason == "task_failed"
    assert "KeyError: 'boom'" in letter.detail


def test_nothing_without_logprobs_is_trained() -> None:
    bare = result(index=0, size=2, logprobs=FloatArray(), logprobs_mode="none")
    samples, [letter] = sampler(on_incomplete_group="train_partial").samples_of(group(bare, result(index=1, size=2)))
    assert [sample.index for sample in samples] == [1]
    assert (letter.seq_id, letter.reason) == ("g:0", "no_logprobs")

    def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
        made = training_sample("g:0", versions=Runs.of([-1, 0, 0, 0]), response_mask=Runs.of([0, 1, 1, 1]))
        return structs.replace(made, group_id="g")

    context = replace(CONTEXT, policy=PolicyConfig(enabled=True))
    own = Sampler(replace(TASK, target=target), context, ConsumerConfig())
    assert [one.reason for one in own.samples_of(group(result()))[1]] == ["no_logprobs"]


def recording(metrics: dict[str, object]) -> Sampler:
    def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
        return structs.replace(exact_answer.target(matched, ctx), metrics=metrics)

    return sampler(replace(TASK, target=target))


def test_flags_that_a_task_records_are_numbers_for_the_trainer() -> None:
    [sample], _ = recording({"custom/right": True, "custom/n": 3}).samples_of(group(result()))
    assert sample.metrics == {"custom/right": 1.0, "custom/n": 3.0}
    assert {type(value) for value in sample.metrics.values()} == {float}


def test_a_metric_that_is_no_number_is_a_drop() -> None:
    for word in ("right", nan, inf):
        samples, [letter] = recording({"custom/word": word}).samples_of(group(result()))
        assert (samples, letter.reason) == ([], "task_failed")


@pytest.mark.parametrize("weight", [nan, inf])
def test_a_weight_that_is_no_number_is_a_drop(weight: float) -> None:
    """Or the step of its whole batch would train nothing."""

    def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
        sample = exact_answer.target(matched, ctx)
        return structs.replace(sample, weights=FloatArray([*list(sample.weights)[:-1], weight]))

    samples, [letter] = sampler(replace(TASK, target=target)).samples_of(group(result()))
    assert (samples, letter.reason) == ([], "task_failed")
    assert "a weight is no finite number" in letter.detail


def test_a_metric_under_an_unknown_name_is_a_drop_that_names_it_and_what_to_write() -> None:
    """Batches reduce the metrics of all their samples: one wrong name would stop the consumer."""
    samples, [letter] = recording({"rightness": 1.0}).samples_of(group(result()))
    assert (samples, letter.reason) == ([], "task_failed")
    assert "'rightness'" in letter.detail
    assert "Own keys start with custom/" in letter.detail


def test_a_sample_that_is_too_long_is_a_drop_that_names_the_limit() -> None:
    samples, [letter] = sampler(max_sample_tokens=3).samples_of(group(result()))
    assert samples == []
    assert letter.reason == "too_long"
    assert "consumer.max_sample_tokens is 3" in letter.detail


def test_a_sequence_whose_prompt_has_an_image_is_never_trained_blind() -> None:
    seen = structs.replace(result(), images=[ImageRef(path="a.png")])
    samples, [letter] = sampler().samples_of(group(seen))
    assert (samples, letter.seq_id, letter.reason) == ([], "g:0", "has_images")
    assert "1 image, but the run's model takes none" in letter.detail


def test_a_sample_has_the_images_of_its_result_whatever_the_task_and_never_trains_their_placeholders() -> None:
    placeholder = 7
    ids = [placeholder, placeholder, 5, placeholder]  # the last one was sampled: a token like any other
    seen = structs.replace(
        result(),
        images=[ImageRef(path="a.png", sha256="0" * 64), ImageRef(path="b.png")],
        prompt_token_ids=TokenArray([]),
        token_ids=TokenArray(ids),
        response_mask=Runs.of([0, 0, 1, 1]),
        versions=Runs.of([-1, -1, 0, 0]),
        logprobs=FloatArray([0.0, 0.0, -1.0, -1.0]),
    )

    def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
        return training_sample(
            "g:0", 4, token_ids=TokenArray(ids), labels=TokenArray(ids), weights=FloatArray([1.0] * 4),
            response_mask=Runs.of([1] * 4), versions=seen.versions, logprobs=seen.logprobs,
        )  # fmt: skip

    [sample], _ = sampler(replace(TASK, target=target), image_token_id=placeholder).samples_of(group(seen))
    assert sample.images == seen.images
    assert list(sample.weights) == [0.0, 0.0, 1.0, 1.0]
    assert sample.response_mask.expand() == [0, 0, 1, 1]


def test_a_model_takes_images_if_its_config_says_so(tmp_path: Path) -> None:
    def token(said: str, **model: object) -> int | None:
        (tmp_path / "config.json").write_text(said)
        return image_token_of(ModelConfig(path=str(tmp_path), **model))  # type: ignore[arg-type]

    assert token('{"vision_config": {"depth": 1}, "image_token_id": 7}') == 7
    assert token('{"vision_config": {"depth": 1}, "image_token_index": 8}') == 8
    assert token('{"vision_config": {"depth": 1}, "image_token_id": 7}', variant="text") is None
    assert token('{"image_token_id": 7}') is None
    assert token("nonsense") is None
    assert image_token_of(ModelConfig(path=str(tmp_path / "none"))) is None


def test_letters_of_the_queue_are_not_recorded_again() -> None:
    dead = DeadLetter(seq_id="g:1", reason="expired")
    unread = DeadLetter(seq_id="g:2", reason="malformed_result", state="dropped")
    whole = group(result(0, 3), dead, unread)
    samples, letters = sampler(on_incomplete_group="train_partial").samples_of(whole)
    assert [sample.seq_id for sample in samples] == ["g:0"]
    assert letters == [unread]
    samples, letters = sampler(on_incomplete_group="drop").samples_of(whole)
    assert samples == []
    assert [letter.reason for letter in letters] == ["malformed_result", "incomplete_group"]


def rewarding(*rewards: float | None, advantage: float | None = None, **options: object) -> Sampler:
    """A sampler with a policy loss whose task gives these rewards, by index of the member."""

    def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
        sample = exact_answer.target(matched, ctx)
        return structs.replace(sample, reward=rewards[matched.parsed.result.index], advantage=advantage)

    context = replace(CONTEXT, policy=PolicyConfig(enabled=True, advantage="group_mean"))
    return Sampler(replace(TASK, target=target), context, ConsumerConfig(**options))  # type: ignore[arg-type]


def advantages(samples: list[TrainingSample]) -> list[float | None]:
    return [sample.advantage for sample in samples]


def test_advantages_compare_the_members_that_have_a_reward() -> None:
    members = [result(at, 4) for at in range(4)]
    samples, letters = rewarding(1.0, None, 0.0, 0.5).samples_of(group(*members))
    assert advantages(samples) == [0.5, None, -0.5, 0.0]
    assert [(one.index, one.group_rewards) for one in samples] == [(0, 3), (1, 0), (2, 3), (3, 3)]
    assert letters == []
    assert advantages(rewarding(None, None).samples_of(group(*members[:2]))[0]) == [None, None]


def test_a_right_answer_beside_a_wrong_one() -> None:
    right = TokenArray(CONTEXT.codec.encode("seven"))
    arrays = {"logprobs": FloatArray([-1.0] * len(right)), "versions": Runs.of([0] * len(right))}
    context = replace(CONTEXT, policy=PolicyConfig(enabled=True))
    both = group(result(0, 2, token_ids=right, **arrays), result(1, 2))
    samples, _ = Sampler(TASK, context, ConsumerConfig()).samples_of(both)
    assert [sample.reward for sample in samples] == [1.0, 0.0]
    assert advantages(samples) == pytest.approx([1.0, -1.0], rel=1e-5)


def test_an_incomplete_group_is_compared_over_who_is_there() -> None:
    whole = group(result(0, 3), DeadLetter(seq_id="g:1", reason="expired"), result(2, 3))
    samples, _ = rewarding(1.0, 7.0, 0.0, on_incomplete_group="train_partial").samples_of(whole)
    assert advantages(samples) == [0.5, -0.5]
    assert rewarding(1.0, 7.0, 0.0, on_incomplete_group="drop").samples_of(whole)[0] == []


def test_an_advantage_of_the_task_stays() -> None:
    samples, _ = rewarding(1.0, 0.0, advantage=3.0).samples_of(group(result(0, 2), result(1, 2)))
    assert advantages(samples) == [3.0, 3.0]
    assert [sample.group_rewards for sample in samples] == [0, 0], "nothing to compute them again from"


@pytest.mark.parametrize("reward", [nan, inf, -inf, 1e31, "1"])
def test_a_reward_that_is_no_usable_number_is_a_drop_that_says_so(reward: float) -> None:
    members = group(result(0, 2), result(1, 2))
    samples, [letter] = rewarding(reward, 1.0, on_incomplete_group="train_partial").samples_of(members)
    assert advantages(samples) == [0.0]
    assert (letter.seq_id, letter.reason) == ("g:0", "task_failed")
    assert f"reward {reward}" in letter.detail


def test_without_a_policy_loss_there_are_no_advantages() -> None:
    samples, _ = sampler().samples_of(group(result(0, 2), result(1, 2)))
    assert [sample.reward for sample in samples] == [0.0, 0.0]
    assert advantages(samples) == [None, None]


def fork(index: int, parts: int, size: int, **changes: object) -> list[SequenceResult]:
    return [result(index, size, part=part, parts=parts, **changes) for part in range(parts)]


def test_the_parts_of_an_index_have_its_one_advantage() -> None:
    members = [*fork(0, 3, 2), result(1, 2)]
    samples, letters = rewarding(1.0, 0.0).samples_of(group(*members, size=2))
    assert letters == []
    assert advantages(samples) == [0.5, 0.5, 0.5, -0.5], "three parts weigh no more than one"
    assert [(one.index, one.group_rewards) for one in samples] == [(0, 2), (0, 2), (0, 2), (1, 2)]
    assert [one.parts for one in samples] == [3, 3, 3, 1]


def test_the_first_part_that_gives_a_sample_speaks_for_its_index() -> None:
    first, second, third = fork(0, 3, 2)
    first = structs.replace(first, finish_reason="error")
    second, third = structs.replace(second, reward=3.0), structs.replace(third, reward=9.0)
    judge = rewarding(0.0, 1.0, on_incomplete_group="train_partial")
    samples, [letter] = judge.samples_of(group(first, second, third, result(1, 2), size=2))
    assert letter.reason == "error"
    assert [sample.reward for sample in samples] == [3.0, 9.0, 1.0]
    assert [sample.parts for sample in samples] == [3, 3, 1], "what is missing can be told"
    assert advantages(samples) == [1.0, 1.0, -1.0]


def test_a_part_that_is_missing_makes_its_group_incomplete() -> None:
    first, second = fork(0, 2, 1)
    samples, letters = sampler().samples_of(group(first, structs.replace(second, finish_reason="deadline"), size=1))
    assert samples == []
    assert [letter.reason for letter in letters] == ["deadline", "incomplete_group"]


def test_the_reward_of_the_agents_side_goes_before_the_tasks() -> None:
    ids = CONTEXT.codec.encode("seven")
    right = result(0, 2, reward=0.25, token_ids=TokenArray(ids), logprobs=FloatArray([-0.5] * len(ids)),
                   versions=Runs.of([0] * len(ids)))  # fmt: skip
    wrong = result(1, 2, reward=-2.0)
    samples, _ = rewarding(1.0, 0.0).samples_of(group(right, wrong))
    assert [sample.reward for sample in samples] == [0.25, -2.0]
    assert [sample.metrics["rollout/rewards"] for sample in samples] == [0.25, -2.0]
    assert advantages(samples) == [1.125, -1.125]
    plain, _ = sampler().samples_of(group(right, wrong))
    assert [sample.reward for sample in plain] == [0.25, -2.0]
    assert sum(plain[0].response_mask) == len(ids), "the task still says what is right"


def by_policy(
    *members: SequenceResult | DeadLetter, size: Any = None, consumer: Any = None,
    **options: Any,
) -> tuple[list[TrainingSample], list[DeadLetter]]:  # fmt: skip
    policy = PolicyConfig(enabled=True, **options)
    matching = RolloutMatchingConfig(task="reward")
    context = TaskContext(CONTEXT.codec, matching, policy=policy)
    return Sampler(load_task(matching), context, consumer or ConsumerConfig()).samples_of(group(*members, size=size))


def rewarded(*rewards: float, **changes: object) -> list[SequenceResult]:
    size = len(rewards)
    return [result(at, size, reward=reward, **changes) for at, reward in enumerate(rewards)]


def test_groups_of_equal_rewards_are_kept_or_dropped() -> None:
    even, odd = rewarded(1.0, 1.0), rewarded(1.0, 0.0)
    for options, members, kept in (
        ({}, even, 2),
        ({"zero_variance": "filter"}, even, 0),
        ({"zero_variance": "filter"}, odd, 2),
        ({"zero_variance": "filter"}, rewarded(1.0), 1),  # nothing to compare
    ):
        samples, letters = by_policy(*members, **options)
        assert len(samples) == kept
        assert [one.reason for one in letters] == ["zero_variance"] * (len(members) - kept)


def test_a_group_without_a_token_to_train_is_dropped_whatever_its_rewards() -> None:
    partial = ConsumerConfig(on_incomplete_group="train_partial")
    survivor, gone = rewarded(1.0, 0.0)
    first, second = fork(0, 2, 2)
    forked = [structs.replace(first, reward=1.0), structs.replace(second, reward=0.0), result(1, 2, reward=1.0)]
    cut = [structs.replace(one, finish_reason="length") for one in rewarded(1.0, 0.0)]
    unrewarded = [*rewarded(1.0, 1.0), result(2, 3)]
    for members, options in (
        ([structs.replace(one, group_size=3) for one in unrewarded], {}),
        ([survivor, structs.replace(gone, finish_reason="error")], {"consumer": partial}),
        (forked, {"size": 2}),  # the parts of an index share the advantage of the first
        (cut, {"mask_truncated": True}),
    ):
        kept, _ = by_policy(*members, **options)
        samples, letters = by_policy(*members, zero_variance="filter", **options)
        assert samples == []
        told = [one.seq_id for one in letters if one.reason == "zero_variance"]
        assert told == [one.seq_id for one in kept]


def test_a_group_with_one_token_to_train_is_kept() -> None:
    cut, whole = rewarded(1.0, 0.0)
    cut = structs.replace(cut, finish_reason="length")
    samples, letters = by_policy(cut, whole, mask_truncated=True, zero_variance="filter")
    assert (len(samples), letters) == (2, [])


def test_a_group_without_a_pair_is_dropped_with_a_loss_on_pairs() -> None:
    """Its rewards differ, but not those of two answers that can be compared."""
    cut, whole = rewarded(1.0, 0.0)
    cut = structs.replace(cut, finish_reason="length")
    first, second = (structs.replace(one, reward=1.0) for one in fork(0, 2, 2))
    lost = [first, structs.replace(second, finish_reason="error"), result(1, 2, reward=0.0)]
    partial = ConsumerConfig(on_incomplete_group="train_partial")
    for members, options in (
        ([cut, whole], {"mask_truncated": True}),
        (lost, {"consumer": partial, "size": 2}),
    ):
        kept, _ = by_policy(*members, zero_variance="filter", **options)
        assert len(kept) == 2
        samples, letters = by_policy(*members, zero_variance="filter", loss="dpo", **options)
        assert samples == []
        told = [one for one in letters if one.reason == "zero_variance"]
        assert [one.seq_id for one in told] == [one.seq_id for one in kept]
        assert "makes no pair" in told[0].detail
    for members in (rewarded(1.0, 0.0), [first, second, result(1, 2, reward=0.0)]):
        samples, letters = by_policy(*members, zero_variance="filter", loss="dpo", size=2)
        assert (len(samples), letters) == (len(members), [])


def test_an_advantage_that_the_task_set_is_not_dropped() -> None:
    def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
        return structs.replace(exact_answer.target(matched, ctx), advantage=0.5)

    policy = PolicyConfig(enabled=True, zero_variance="filter")
    context = TaskContext(CONTEXT.codec, CONTEXT.options, policy=policy)
    own = Sampler(replace(TASK, target=target), context, ConsumerConfig())
    samples, letters = own.samples_of(group(*rewarded(1.0, 1.0)))
    assert (advantages(samples), letters) == ([0.5, 0.5], [])


def test_a_group_that_trains_otherwise_is_not_dropped() -> None:
    policy = PolicyConfig(enabled=True, zero_variance="filter", ce_weight=0.5)
    context = TaskContext(CONTEXT.codec, RolloutMatchingConfig(task="exact_answer"), policy=policy)
    right = [structs.replace(one, truth=None) for one in rewarded(1.0, 1.0)]  # both are right: cross-entropy
    samples, letters = Sampler(TASK, context, ConsumerConfig()).samples_of(group(*right))
    assert (len(samples), letters) == (2, [])


def test_the_weight_of_the_first_token_trains_nothing() -> None:
    def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
        made = exact_answer.target(matched, ctx)
        return structs.replace(made, weights=FloatArray([1.0, *made.weights[1:]]))

    context = replace(CONTEXT, policy=PolicyConfig(enabled=True, zero_variance="filter"))
    sampler = Sampler(replace(TASK, target=target), context, ConsumerConfig())
    samples, letters = sampler.samples_of(group(*rewarded(1.0, 1.0)))
    assert (samples, [one.reason for one in letters]) == ([], ["zero_variance"] * 2)


def test_a_cut_sequence_trains_no_token_and_its_reward_counts() -> None:
    cut, whole = rewarded(1.0, 0.0)
    cut = structs.replace(cut, finish_reason="length")
    plain, _ = by_policy(cut, whole)
    samples, letters = by_policy(cut, whole, mask_truncated=True)
    assert letters == []
    assert [one.advantage for one in samples] == [one.advantage for one in plain]
    assert samples[1] == plain[1]
    on = np.array(plain[0].response_mask.expand())
    assert on.any()
    assert not any(samples[0].response_mask)
    assert list(samples[0].left_out) == np.where(on == 1, LeftOut.truncated, LeftOut.no).tolist()


def test_a_cut_right_answer_has_no_cross_entropy_either() -> None:
    cut, whole = (structs.replace(one, truth=None) for one in rewarded(1.0, 1.0))
    cut = structs.replace(cut, finish_reason="length")
    policy = PolicyConfig(enabled=True, mask_truncated=True, ce_weight=0.5)
    context = TaskContext(CONTEXT.codec, RolloutMatchingConfig(task="exact_answer"), policy=policy)
    samples, _ = Sampler(TASK, context, ConsumerConfig()).samples_of(group(cut, whole))
    assert any(samples[1].weights)
    assert not any(samples[0].weights)


def test_the_reward_of_what_is_overlong_falls() -> None:
    members = rewarded(1.0, 1.0)
    length = sum(by_policy(*members)[0][0].response_mask)
    for limit, buffer, wanted in ((length - 1, 0, 0.0), (length, 0, 1.0), (length + 1, 2, 0.5), (length + 2, 2, 1.0)):
        samples, _ = by_policy(*members, overlong_tokens=limit, overlong_buffer=buffer)
        assert [one.reward for one in samples] == [wanted] * 2
        shares = [one.metrics["reward/overlong"] for one in samples]
        assert [str(share) for share in shares] == [str(wanted - 1.0)] * 2, "never -0.0"


def test_the_rules_on_length_count_reshaped_tokens_too() -> None:
    span = Reshaped(start=0, end=2, sampling=SamplingParams(presence_penalty=1.0))
    plain = structs.replace(result(reward=1.0), truth=None, finish_reason="length")
    options: dict[str, Any] = {"mask_truncated": True, "ce_weight": 0.5, "overlong_tokens": 3, "overlong_buffer": 2}
    context = replace(CONTEXT, policy=PolicyConfig(enabled=True, **options))
    one = Sampler(TASK, context, ConsumerConfig())
    [wanted], [] = one.samples_of(group(plain))
    [found], [] = one.samples_of(group(structs.replace(plain, reshaped=[span])))
    assert (wanted.reward, any(wanted.weights)) == (0.0, False)
    assert found.reshaped
    assert structs.replace(found, reshaped=[], metrics={}) == structs.replace(wanted, metrics={})


@pytest.mark.parametrize("on_reshaped", ["mask", "train"])
def test_tokens_drawn_from_another_distribution_are_marked_and_by_default_not_trained(on_reshaped: Any) -> None:
    policy = PolicyConfig(enabled=True, advantage="reward", on_reshaped=on_reshaped)
    context = replace(CONTEXT, policy=policy)
    span = Reshaped(start=1, end=3, sampling=SamplingParams(presence_penalty=1.0))
    [sample], [] = Sampler(TASK, context, ConsumerConfig()).samples_of(group(result(reshaped=[span], reward=1.0)))
    start = len(result().prompt_token_ids)
    assert [(one.start - start, one.end - start, one.sampling) for one in sample.reshaped] == [(1, 3, span.sampling)]
    assert sample.metrics["rollout/reshaped_tokens"] == 2
    on = [1, 1, 1] if on_reshaped == "train" else [1, 0, 0]
    assert sample.response_mask.expand() == [0] * start + on
    left = [LeftOut.no if one else LeftOut.reshaped for one in on]
    assert (sample.left_out.expand() or [0] * (start + 3)) == [LeftOut.no] * start + left


def test_a_task_that_writes_other_tokens_trains_none_behind_a_reshaped_one() -> None:
    """Its span can't be followed there."""

    def target(matched: Matched, ctx: TaskContext) -> TrainingSample:
        made = exact_answer.target(matched, ctx)
        ids = [*made.token_ids[:3], 99, *made.token_ids[3:-1]]
        return structs.replace(made, token_ids=TokenArray(ids), labels=TokenArray(ids))

    context = replace(CONTEXT, policy=PolicyConfig(enabled=True, advantage="reward"))
    span = Reshaped(start=1, end=2, sampling=SamplingParams(presence_penalty=1.0))
    given = group(result(reshaped=[span], reward=1.0))
    [sample], [] = Sampler(replace(TASK, target=target), context, ConsumerConfig()).samples_of(given)
    assert sample.response_mask.expand() == [0, 0, 1, 0, 0]
