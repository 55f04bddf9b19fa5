"""The guard's counters come from the flags of results, and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.consumers.tasks.rollout import rollout_metrics
from sluice.pipeline.telemetry.training_metrics import reduce
from sluice.pipeline.wire.messages import SamplingParams, SequenceResult
from sluice.pipeline.wire.tokens import Runs
from tests.factories import sequence_result

PREFIX = "rollout/repeat_terminate_"


def result(number: int, **changes: Any) -> SequenceResult:
    fields: dict[str, Any] = {
        "sampling": SamplingParams(max_new_tokens=100), "backend": "hf",
        "triggers": {"repeat_terminate": 0, "active": 1},
    }  # fmt: skip
    return sequence_result(f"r:{number}", **{**fields, **changes})


def looped(number: int, at_token: int, **changes: Any) -> SequenceResult:
    triggers = {"repeat_terminate": 1, "active": 1, "rule": "ngram", "at_token": at_token}
    return result(
        number, triggers=triggers, finish_reason="repeat_terminated", response_mask=Runs.of([1, 1, 0]), **changes
    )


def guard(*results: SequenceResult) -> tuple[float, float, float]:
    found = reduce([rollout_metrics(one) for one in results])
    names = ("active", "triggered_sequences", "tokens_saved")
    active, triggered, saved = (found[PREFIX + name] for name in names)
    return active, triggered, saved


def test_each_flag_counts_once_and_saves_what_was_left_of_its_own_limit() -> None:
    longer = SamplingParams(max_new_tokens=1000)
    assert guard(looped(1, 2), looped(2, 60, sampling=longer), result(3)) == (1, 2, 98 + 940)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_an_ending_without_a_flag_counts_nothing(reason: Any) -> None:
    assert guard(result(1, finish_reason=reason)) == (1, 0, 0)
    assert guard(result(1, finish_reason=reason, triggers={})) == (0, 0, 0)


def test_both_backends_are_told_apart() -> None:
    found = reduce([rollout_metrics(result(1, backend=name)) for name in ("hf", "vllm")])
    assert (found["rollout/backend_hf"], found["rollout/backend_vllm"]) == (1, 1)
    alone = reduce([rollout_metrics(looped(1, 2, backend="vllm"))])
    assert (alone["rollout/backend_hf"], alone["rollout/backend_vllm"]) == (0, 1)
    assert alone[f"{PREFIX}triggered_sequences"] == 1


def test_turns_are_averaged_and_what_stands_between_them_is_not_generated() -> None:
    single = looped(1, 2)  # the terminator that the guard forced is no tool's
    several = result(2, turn=3, response_mask=Runs([(1, 1), (0, 1), (1, 1)]))
    found = reduce([rollout_metrics(one) for one in (single, several)])
    assert (found["rollout/num_turns"], found["rollout/tool_tokens"]) == (2, 1)
    assert found["rollout/gen_new_tokens_total"] == 3 + 2
    assert found["rollout/rollout_len_mean"] == 3
