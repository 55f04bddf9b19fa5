"""The Model Runner V2 adapter, driven through vLLM's own interface types; see `slots` for what stands on the CPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.guard.object_keys import ObjectKeys
from sluice.workers.guard.repeat import RepeatTrigger, Rule
from sluice.workers.guard.requests import GuardArguments, GuardRequests
from sluice.workers.guard.rules import GuardRules
from sluice.workers.guard.vllm_runners import V2Slots
from tests.unit.workers.guard.slots import MAX_REQS, VOCAB, Request, changed_rows, context, request_state

pytestmark = pytest.mark.vllm

RULES = GuardRules(
    RepeatTerminateConfig(
        enabled=True, min_new_tokens=2, max_consecutive_token_repeats=3, ngram_size=2, max_object_keys=4
    ),
    ObjectKeys.of(b"key", [b"ey", b"k", b"."]),
)


class Runner:
    """The adapter, with what Model Runner V2 would hand it."""

    def __init__(self) -> None:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcRequestState

        self.state = request_state()
        self.requests = GuardRequests(RULES)
        self.slots = V2Slots(self.requests, LogitsProcRequestState.from_request_state(self.state))

    def add(
        self, slot: int, prompt: list[int], resumed: list[int] | None = None, *, forced: int = 9, offset: int = 0
    ) -> Request:
        from vllm import SamplingParams

        arguments = GuardArguments(key=f"s{slot}", forced=forced, offset=offset)
        assert self.slots.add_request(slot, SamplingParams(extra_args=arguments.plain()))
        return Request(self.state, slot, prompt, resumed)

    def step(self, *requests: Request | tuple[int, int]) -> dict[int, int]:
        """Slot → forced id."""
        rows = [item if isinstance(item, tuple) else (item.slot, item.visible) for item in requests]
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(5))
        before = logits.clone()
        assert self.slots.apply(logits, context(self.state, rows)) is logits
        return {rows[row][0]: token for row, token in changed_rows(before, logits).items()}


def test_only_generated_tokens_count() -> None:
    runner = Runner()
    request = runner.add(0, [4] * 9)
    for _ in range(3):
        assert runner.step(request) == {}
        request.add(4)
    assert runner.step(request) == {0: 9}
    assert runner.requests.take("s0") == RepeatTrigger("consecutive", 3)


def test_token_id_0_is_a_token_and_may_be_the_end() -> None:
    runner = Runner()
    request = runner.add(2, [4], forced=0)
    for _ in range(3):
        assert runner.step(request) == {}
        request.add(0)
    assert runner.step(request) == {2: 0}


def test_a_recycled_slot_starts_anew() -> None:
    runner = Runner()
    assert runner.step(runner.add(1, [5], [4, 4, 4])) == {1: 9}
    request = runner.add(1, [5, 4], forced=8)
    for token in (4, 4, 4):
        assert runner.step(request) == {}
        request.add(token)
    assert runner.step(request) == {1: 8}


def test_rows_in_the_middle_of_their_prefill_are_left_alone() -> None:
    runner = Runner()
    request = runner.add(0, [4, 4, 4, 4, 2], [4, 4, 4])
    for visible in (2, 4, 7):
        assert runner.step((0, visible)) == {}
    assert runner.requests.take("s0") is None
    assert runner.step(request) == {0: 9}


def test_a_preempted_request_brings_what_it_had_generated() -> None:
    """`prefill_len` is longer than `prompt_len` then."""
    runner = Runner()
    request = runner.add(0, [4, 4], [4, 4])
    assert runner.step(request) == {}
    request.add(4)
    assert runner.step(request) == {0: 9}
    assert runner.requests.take("s0") == RepeatTrigger("consecutive", 3)


@pytest.mark.parametrize(("offset", "at_token"), [(0, None), (1, None), (2, 3), (3, 4), (99, 6)])
def test_a_resumed_request_begins_with_the_end_of_its_prompt(offset: int, at_token: int | None) -> None:
    runner = Runner()
    request = runner.add(0, [7, 6, 2, 4, 4], offset=offset)
    assert runner.step(request) == {}
    request.add(4)
    assert runner.step(request) == ({} if at_token is None else {0: 9})
    assert runner.requests.take("s0") == (RepeatTrigger("consecutive", at_token) if at_token else None)


def test_a_missed_step_reads_all_of_it_again() -> None:
    runner = Runner()
    request = runner.add(0, [7, 4], offset=1)
    assert runner.step(request) == {}
    request.add(3)
    request.add(4)
    assert runner.step(request) == {}
    request.add(4)
    request.add(4)
    assert runner.step(request) == {0: 9}
    assert runner.requests.take("s0") == RepeatTrigger("consecutive", 5)


def test_a_step_that_is_taken_back_is_read_again() -> None:
    """Tokens that vLLM discards, as after a failed load of cached keys and values."""
    runner = Runner()
    request = runner.add(0, [7], [4, 4, 4])
    assert runner.step(request) == {0: 9}
    request.visible -= 1
    runner.state.prefill_len.np[0] = request.visible
    assert runner.step(request) == {}
    request.add(5)
    assert runner.step(request) == {}


@pytest.mark.parametrize(
    ("rule", "loop"), [("object_keys", [1, 0] * 4), ("consecutive", [9, 9, 9]), ("ngram", [9, 4, 9, 4])]
)
def test_the_step_after_the_reserved_id_changes_no_trigger(rule: Rule, loop: list[int]) -> None:
    """An asynchronous scheduler has sent it by then. The reserved id goes on with each of these loops."""
    runner = Runner()
    request = runner.add(0, loop, offset=len(loop))
    assert runner.step(request) == {0: 9}
    for drawn in (9, 9):
        request.add(drawn)
        runner.step(request)
    assert runner.requests.take("s0") == RepeatTrigger(rule, len(loop))


@pytest.mark.parametrize("missed", [0, 3])
def test_the_step_after_a_reserved_id_that_the_model_chose_has_no_trigger(missed: int) -> None:
    """That id completes a loop, but vLLM ends the request there; it is sent again, and triggers then."""
    runner = Runner()
    request = runner.add(0, [9, 9], offset=2)
    assert runner.step(request) == {}
    for at, drawn in enumerate((9, 3, 3, 3)):
        request.add(drawn)
        if at >= missed:
            runner.step(request)
    assert runner.requests.take("s0") is None
    assert runner.step(runner.add(0, [9, 9, 9], offset=3)) == {0: 9}
    assert runner.requests.take("s0") == RepeatTrigger("consecutive", 3)


def test_the_same_step_twice_does_not_grow() -> None:
    runner = Runner()
    request = runner.add(0, [7], [4, 4])
    assert [runner.step(request) for _ in range(3)] == [{}] * 3


def test_slots_that_nobody_announced_are_left_alone() -> None:
    runner = Runner()
    assert runner.step((3, 0), (4, 0)) == {}


@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_any_schedule_triggers_as_one_guard_for_each_request(seed: int) -> None:
    """Slots recycled, rows in any order, some requests left out of a step, some resumed."""
    drawn, runner = random.Random(seed), Runner()
    live: dict[int, tuple[Request, Any]] = {}
    for _ in range(40):
        slot = drawn.randrange(MAX_REQS)
        if slot not in live or drawn.random() < 0.1:
            old = [drawn.randrange(2) for _ in range(drawn.randrange(4))]
            offset = drawn.randrange(3)
            request, guard = runner.add(slot, [0, 1, 0], old, offset=offset), RULES.guard()
            guard.push_all([0, 1, 0][3 - offset :] + old)
            live[slot] = request, guard
        chosen = drawn.sample(sorted(live), drawn.randint(1, len(live)))
        wanted = {number: 9 for number in chosen if live[number][1].trigger is not None}
        assert runner.step(*(live[number][0] for number in chosen)) == wanted
        for number in live:
            taken = live[number][1].trigger if number in chosen else None
            assert runner.requests.take(f"s{number}") == taken
        for number in chosen:
            token = drawn.randrange(2)
            live[number][0].add(token)
            live[number][1].push(token)
