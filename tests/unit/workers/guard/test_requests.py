"""What a request may tell the guard, and the triggers that wait to be asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.guard import requests
from sluice.workers.guard.repeat import RepeatTrigger
from sluice.workers.guard.requests import EXTRA, GuardArguments, GuardRequests
from sluice.workers.guard.rules import GuardRules

RULES = GuardRules(RepeatTerminateConfig(enabled=True, min_new_tokens=0, max_consecutive_token_repeats=5))
PROBE = GuardRules(RepeatTerminateConfig(enabled=True, min_new_tokens=0, max_consecutive_token_repeats=2))


def sampling(asked: GuardArguments | None = None, eos_token_id: int | None = None) -> Any:
    return SimpleNamespace(extra_args=None if asked is None else asked.plain(), eos_token_id=eos_token_id)


def run_that_ends(begun: tuple[Any, GuardArguments]) -> int:
    guard, _ = begun
    return next(count for count in range(1, 9) if guard.push(3) is not None)


def test_arguments_go_round() -> None:
    asked = GuardArguments(key="a", forced=0, offset=3, probe=PROBE.plain())
    assert GuardArguments.of(asked.plain()) == asked
    assert GuardArguments.of({"theirs": 1, **asked.plain()}) == asked


@pytest.mark.parametrize("extra", [None, {}, {"theirs": {"key": "a"}}, {EXTRA: None}])
def test_no_arguments_are_none(extra: dict[str, Any] | None) -> None:
    assert GuardArguments.of(extra) is None


@pytest.mark.parametrize(
    "found",
    [
        3,
        [],
        {},
        {"key": "a"},
        {"forced": 1},
        {"key": 1, "forced": 1},
        {"key": "a", "forced": "1"},
        {"key": "a", "forced": None},
        {"key": "a", "forced": 1, "offset": 1.5},
        {"key": "a", "forced": 1, "probe": []},
        {"key": "a", "forced": 1, "ofset": 1},
    ],
)
def test_arguments_that_cannot_be_read_are_refused(found: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        GuardArguments.of({EXTRA: found})


def test_rules_of_a_request_count_until_the_engine_has_started() -> None:
    held = GuardRequests(RULES)
    asked = GuardArguments(key="a", forced=7, probe=PROBE.plain())
    assert run_that_ends(held.begin(sampling(asked))) == 2
    held.started()
    guard, kept = held.begin(sampling(asked))
    assert run_that_ends((guard, kept)) == 5
    assert kept == asked


def test_a_request_without_arguments_ends_by_its_own_end_then_by_that_of_the_engine() -> None:
    held = GuardRequests(RULES, eos=6)
    assert held.begin(sampling(eos_token_id=0))[1] == GuardArguments(key="", forced=0)
    assert held.begin(sampling())[1].forced == 6
    assert run_that_ends(held.begin(sampling())) == 5


def test_a_trigger_is_handed_out_once() -> None:
    held, trigger = GuardRequests(RULES), RepeatTrigger("ngram", 4)
    held.note("a", trigger)
    assert [held.take("b"), held.take("a"), held.take("a")] == [None, trigger, None]
    held.note("", trigger)
    assert held.take("") is None


def test_triggers_that_nobody_asks_for_are_bounded_and_the_oldest_go() -> None:
    held, bound = GuardRequests(RULES), requests._MAX_NOTED
    for number in range(bound + 3):
        held.note(str(number), RepeatTrigger("ngram", number))
    assert [held.take(str(number)) for number in range(3)] == [None] * 3
    kept = [held.take(str(number)) for number in range(3, bound + 3)]
    assert kept == [RepeatTrigger("ngram", number) for number in range(3, bound + 3)]
