"""Right answers train on what was sampled, wrong ones on the truth; with a policy loss both on what was sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sluice.consumers.tasks.registry import load_task
from sluice.consumers.tasks.segments import Segment
from sluice.consumers.tasks.task import TaskContext
from sluice.pipeline.config.types import PolicyConfig, RolloutMatchingConfig
from sluice.pipeline.errors import TaskError
from sluice.pipeline.telemetry.training_metrics import reduce
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.detection_rollouts import PROMPT, rollout
from tests.merged_tokenizers import family_codec
from tests.tiny_tokenizer import tiny_codec

OPTIONS = RolloutMatchingConfig(task="exact_answer")
CTX = TaskContext(tiny_codec(), OPTIONS)
EOS = CTX.codec.eos_token_ids[0]


def run(ids: list[int], truth: Any, policy: PolicyConfig | None = None, **fields: Any) -> TrainingSample:
    task, ctx = load_task(OPTIONS), replace(CTX, policy=policy or PolicyConfig())
    return task.target(task.match(task.parse(rollout(ids, **fields), ctx), truth, ctx), ctx)


def ids_of(text: str, *, ended: bool = True) -> list[int]:
    return CTX.codec.encode(text) + [EOS] * ended


@pytest.mark.parametrize("ended", [True, False])
def test_a_right_answer_trains_on_the_sampled_tokens(ended: bool) -> None:
    ids = ids_of(" seven\n", ended=ended)
    sample = run(ids, "seven")
    assert sample.reward == 1.0
    assert list(sample.token_ids[len(PROMPT) :]) == ids_of(" seven\n")
    assert list(sample.weights) == [0.0] * 3 + [1.0] * (len(ids) + (not ended))
    assert sum(sample.response_mask) == len(ids)
    assert list(sample.segments)[-2:] == [Segment.matched_desc, Segment.closing]


@pytest.mark.parametrize("text", ["nine", "", "sevenn"])
def test_a_wrong_answer_trains_on_the_truth(text: str) -> None:
    sample = run(ids_of(text), {"answer": "seven"})
    assert sample.reward == 0.0
    assert list(sample.token_ids[len(PROMPT) :]) == ids_of("seven")
    assert list(sample.labels[len(PROMPT) :]) == ids_of("seven")
    assert set(sample.weights[len(PROMPT) :]) == {1.0}
    assert sum(sample.response_mask) == 0
    assert set(sample.logprobs) == {0.0}


PROMPT_LEN = len(PROMPT)
POLICY = PolicyConfig(enabled=True, ce_weight=0.25)


def scored(ids: list[int]) -> dict[str, Any]:
    """The proximal arrays of a result, the first token scored."""
    return {
        "proximal_logprobs": FloatArray([-0.25, *(-0.5 - at / 64 for at in range(1, len(ids)))]),
        "proximal_versions": Runs.of([4] + [-1] * (len(ids) - 1)),
    }


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(("text", "reward"), [(" seven\n", 1.0), ("nine", 0.0)])
def test_with_a_policy_loss_everything_sampled_is_kept_and_nothing_else(text: str, reward: float, ended: bool) -> None:
    ids = ids_of(text, ended=ended)
    sample = run(ids, "seven", POLICY, **scored(ids))
    result = rollout(ids, **scored(ids))
    assert sample.reward == reward
    assert list(sample.token_ids) == list(sample.labels) == [*PROMPT, *ids]
    assert list(sample.weights) == [0.0] * PROMPT_LEN + [0.25 * reward] * len(ids)
    assert list(sample.response_mask) == [0] * PROMPT_LEN + [1] * len(ids)
    assert list(sample.logprobs[PROMPT_LEN:]) == list(result.logprobs)
    assert list(sample.versions)[PROMPT_LEN:] == list(result.versions)
    assert list(sample.proximal_logprobs[PROMPT_LEN:]) == list(result.proximal_logprobs)
    assert list(sample.proximal_versions)[PROMPT_LEN:] == list(result.proximal_versions)
    assert (list(sample.segments)[-1] == Segment.closing) == ended
    assert sample.metrics["rollout/append_len"] == 0.0


def test_with_a_policy_loss_what_was_not_sampled_stays_off() -> None:
    """Tool output between two turns, and a terminator that a guard forced."""
    first, tool, second = ids_of("seven"), CTX.codec.encode("tool says"), ids_of("so")
    ids = first + tool + second
    mask = [1] * len(first) + [0] * len(tool) + [1] * (len(second) - 1) + [0]
    sample = run(ids, "so", POLICY, response_mask=Runs.of(mask), finish_reason="repeat_terminated")
    assert list(sample.token_ids[PROMPT_LEN:]) == ids
    assert list(sample.response_mask)[PROMPT_LEN:] == mask
    assert list(sample.weights)[PROMPT_LEN:] == [0.25 * on for on in mask]


CALL, TOOL = ids_of("call the tool"), [*CTX.codec.encode("tool says nine"), EOS]


def trajectory(last: list[int]) -> dict[str, Any]:
    """Two turns with a tool's answer, terminator and all, between them."""
    ids, mask = CALL + TOOL + last, [1] * len(CALL) + [0] * len(TOOL) + [1] * len(last)
    versions = Runs.of(3 if on else -1 for on in mask)
    return {"ids": ids, "response_mask": Runs.of(mask), "versions": versions, "turn": 2}


@pytest.mark.parametrize("ended", [True, False])
def test_of_several_turns_the_last_one_answers(ended: bool) -> None:
    last = ids_of("seven", ended=ended)
    sample = run(**trajectory(last), truth="seven")
    assert sample.reward == 1.0
    assert list(sample.token_ids[PROMPT_LEN:]) == CALL + TOOL + ids_of("seven")
    on = [1] * len(CALL) + [0] * len(TOOL) + [1] * (len(last) + (not ended))
    assert list(sample.weights)[PROMPT_LEN:] == on
    assert list(sample.response_mask)[PROMPT_LEN:] == on[: len(on) - (not ended)] + [0] * (not ended)
    assert {code for code, tool in zip(list(sample.segments)[PROMPT_LEN:], on, strict=True) if not tool} == {0}
    found = reduce([sample.metrics])
    assert (found["rollout/num_turns"], found["rollout/tool_tokens"]) == (2, len(TOOL))
    assert found["rollout/gen_new_tokens_total"] == len(CALL) + len(last)
    assert found["rollout/parse_truncated"] == float(not ended)


def test_what_a_tool_says_after_the_last_turn_is_not_trained() -> None:
    ids = ids_of("seven", ended=False)
    sample = run(ids + TOOL, "seven", response_mask=Runs.of([1] * len(ids) + [0] * len(TOOL)))
    assert list(sample.token_ids[PROMPT_LEN:]) == [*ids, EOS]
    assert list(sample.weights)[PROMPT_LEN:] == [1.0] * (len(ids) + 1)


def test_what_an_earlier_turn_or_a_tool_says_is_no_answer() -> None:
    for said in ("call the tool", "tool says nine"):
        assert run(**trajectory(ids_of("seven")), truth=said).reward == 0.0


def test_a_wrong_last_turn_is_taught_the_truth_after_the_turns_before_it() -> None:
    sample = run(**trajectory(ids_of("eight")), truth="seven")
    before, taught = CALL + TOOL, ids_of("seven")
    assert sample.reward == 0.0
    assert list(sample.token_ids[PROMPT_LEN:]) == before + taught
    assert list(sample.weights)[PROMPT_LEN:] == [0] * len(before) + [1] * len(taught)
    assert list(sample.response_mask)[PROMPT_LEN:] == [1] * len(CALL) + [0] * (len(TOOL) + len(taught))
    assert list(sample.versions)[PROMPT_LEN:] == [3] * len(CALL) + [-1] * (len(TOOL) + len(taught))


def test_a_reward_stands_for_a_truth_that_is_not_there() -> None:
    ids = ids_of("anything")
    assert list(run(ids, None, reward=0.5).weights)[PROMPT_LEN:] == [1.0] * len(ids)
    assert list(run(ids, None, POLICY, reward=0.0).weights)[PROMPT_LEN:] == [0.0] * len(ids)
    with pytest.raises(TaskError, match="no truth, so there is nothing to train"):
        run(ids, None, reward=0.0)
    with pytest.raises(TaskError, match="truth is None"):
        run(ids, None)


def test_with_a_policy_loss_a_truth_that_cannot_be_written_is_still_refused() -> None:
    with pytest.raises(TaskError, match="terminator"):
        run(ids_of("b"), "a<|im_end|>", POLICY)


def test_an_empty_answer_has_no_token_to_train() -> None:
    sample = run([], "seven", POLICY)
    assert (list(sample.token_ids), sum(sample.response_mask), sample.reward) == (PROMPT, 0, 0.0)


def test_the_last_match_of_the_pattern_counts() -> None:
    truth = {"answer": "42", "pattern": r"answer: (\d+)"}
    samples = [run(ids_of(text), truth) for text in ("answer: 1, no, answer: 42", "answer: 42, no, answer: 1", "42")]
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.0]
    assert reduce([sample.metrics for sample in samples])["rollout/reward_mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("pattern", [None, r"is (.*)"])
def test_what_is_taught_is_right_though_the_tokenizer_normalizes_it(pattern: str | None) -> None:
    codec = family_codec("qwen_like")
    ctx = replace(CTX, codec=codec)
    truth = {"answer": "cafe\u0301 cre\u0300me", "pattern": pattern}

    def judged(ids: list[int]) -> TrainingSample:
        task = load_task(OPTIONS)
        return task.target(task.match(task.parse(rollout([*before, *ids]), ctx), truth, ctx), ctx)

    before: list[int] = []
    taught = list(judged(codec.encode("tea")).token_ids)[PROMPT_LEN:-1]
    assert codec.decode(taught) == "caf\u00e9 cr\u00e8me"
    before = codec.encode("it is ") if pattern else []
    decomposed = [token for char in "cafe\u0301 cre\u0300me" for token in codec.encode(char)]
    assert codec.decode(decomposed) == truth["answer"]
    rewards = [judged(ids).reward for ids in (taught, decomposed, codec.encode("cafe creme"))]
    assert rewards == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$", r"a*a*a*a*a*b", r"(.*)(.*)(.*)\1x"])
def test_a_catastrophic_pattern_costs_bounded_time(pattern: str) -> None:
    """Without the bound, none of them ends."""
    assert run(ids_of("a" * 3000 + "!"), {"answer": "a", "pattern": pattern}).reward == 0.0


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        (None, "give a string"),
        ({"answer": ""}, "non-empty"),
        ({"answer": "a", "more": 1}, "answer, pattern"),
        ({"answer": "a", "pattern": "("}, "not a valid regular expression"),
        ({"answer": "a", "pattern": "a" * 2000}, "at most"),
        ("a<|im_end|>", "terminator"),
        ("\ud800", "Unicode"),
    ],
)
def test_a_bad_truth_says_where_and_what_to_do(truth: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        run(ids_of("b"), truth)
    assert "job:0" in str(caught.value)
