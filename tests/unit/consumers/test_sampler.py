"""A group's samples, and a reason for every member that gives none."""

from __future__ import annotations

from dataclasses import replace

from consumers import exact_answer
from consumers.group import Group
from consumers.sampler import Sampler
from consumers.task import Parsed, Task, TaskContext
from pipeline.config.types import ConsumerConfig, RolloutMatchingConfig
from pipeline.messages import DeadLetter, SequenceResult
from tests.factories import sequence_result
from tests.tiny_tokenizer import tiny_codec

TASK = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)
CONTEXT = TaskContext(tiny_codec("bytes"), RolloutMatchingConfig(task="exact_answer"))


def sampler(task: Task = TASK, **options: object) -> Sampler:
    return Sampler(task, CONTEXT, ConsumerConfig(**options))  # type: ignore[arg-type]


def group(*members: SequenceResult | DeadLetter, size: int | None = None) -> Group:
    return Group("g", size or len(members), dict(enumerate(members)), [str(at) for at in range(len(members))])


def result(index: int = 0, size: int = 1, **changes: object) -> SequenceResult:
    return sequence_result("g", index, size, truth="seven", task="exact_answer", **changes)


def test_a_step_that_raises_is_a_drop_with_its_traceback() -> None:
    def broken(result: SequenceResult, ctx: TaskContext) -> Parsed:
        raise KeyError("boom")

    samples, [letter] = sampler(replace(TASK, parse=broken)).samples_of(group(result()))
    assert samples == []
    assert letter.reason == "task_failed"
    assert "KeyError: 'boom'" in letter.detail


def test_a_sample_that_is_too_long_is_a_drop_that_names_the_limit() -> None:
    samples, [letter] = sampler(max_sample_tokens=3).samples_of(group(result()))
    assert samples == []
    assert letter.reason == "too_long"
    assert "consumer.max_sample_tokens is 3" in letter.detail


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
