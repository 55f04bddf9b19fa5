"""A list of tokens that an engine appends to."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.guard.repeat import RepeatGuard, RepeatTrigger
from sluice.workers.guard.watch import GuardCost, Watch, triggered

CONFIG = RepeatTerminateConfig(enabled=True, min_new_tokens=0, max_consecutive_token_repeats=3, ngram_size=2)


@dataclass
class Row:
    watch: Watch | None


def watch(generated: list[int]) -> Watch:
    return Watch(RepeatGuard(CONFIG), generated, forced=9)


def test_each_token_is_read_once_however_often_one_looks() -> None:
    generated = [4, 4]
    watched = watch(generated)
    assert [watched.look() for _ in range(3)] == [None] * 3
    generated.append(4)
    assert [watched.look() for _ in range(3)] == [RepeatTrigger("consecutive", 3)] * 3
    assert watched.guard.length == 3


def test_nothing_generated_is_no_trigger() -> None:
    assert watch([]).look() is None


def test_places_of_an_asynchronous_scheduler_are_read_when_they_are_filled() -> None:
    generated = [0, 0, -1, -1]
    watched = watch(generated)
    assert watched.look() is None
    assert watched.guard.length == 2
    generated[2] = 0
    assert watched.look() == RepeatTrigger("consecutive", 3)
    generated[3] = 5
    assert watched.look() is None
    assert watched.guard.length == 4


@given(st.lists(st.integers(0, 2), max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_growth_between_looks_does_not_matter(tokens: list[int], draws: random.Random) -> None:
    generated: list[int] = []
    watched, guard = watch(generated), RepeatGuard(CONFIG)
    for token in tokens:
        generated.append(token)
        guard.push(token)
        if draws.random() < 0.5:
            assert watched.look() == guard.trigger
    assert watched.look() == guard.trigger


def test_rows_of_our_own_loop_are_found_by_index() -> None:
    cost = GuardCost()
    rows = [Row(item) for item in (watch([1, 1, 1]), None, watch([1]), watch([2, 3, 2, 3]))]
    assert triggered(rows, cost) == {0: RepeatTrigger("consecutive", 3), 3: RepeatTrigger("ngram", 4)}
    assert (cost.steps, cost.tokens) == (1, 4)
    triggered(rows[:1], cost)
    taken = cost.taken()
    assert (taken.steps, taken.tokens) == (2, 5)
    assert taken.spent_ns > 0
    assert taken.elapsed_ns > 0
    assert cost == GuardCost()
