"""Which sequences go back into vLLM's core after a swap, and when."""

from __future__ import annotations

import pytest

from sluice.workers.engine.vllm.resubmission import FIRST_TOKENS, Resubmission


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sent(waiting: Resubmission[str], keys: str) -> str:
    return "".join(key for key in keys if not waiting.waits(key))


def test_without_a_bound_all_go_at_once() -> None:
    called: list[bool] = []
    waiting: Resubmission[str] = Resubmission(None, lambda: called.append(True))
    assert waiting.is_over
    waiting.begin({"a": 10_000, "b": 900, "c": 5})
    assert sent(waiting, "abc") == "abc"
    assert called == [True]
    for key in "abc":
        waiting.runs(key)
    assert waiting.is_over


def test_slices_are_as_long_as_the_measured_rate_allows() -> None:
    """One after the other: a slice waits for the first token of each sequence of the one before."""
    clock = Clock()
    waiting: Resubmission[str] = Resubmission(0.5, lambda: None, clock)
    waiting.begin({"a": FIRST_TOKENS - 100, "b": 100, "c": 900, "d": 1_000, "e": 5_000})
    assert sent(waiting, "abcde") == "ab"
    clock.now += 0.1
    waiting.runs("a")
    assert sent(waiting, "abcde") == "ab"
    clock.now += 0.028
    waiting.runs("b")  # 512 tokens in 0.128 s: 4,000 a second, 2,000 in half a second
    assert waiting.budget == pytest.approx(2_000)
    assert sent(waiting, "abcde") == "abcd"
    clock.now += 0.5
    for key in "cd":
        waiting.runs(key)
    assert sent(waiting, "abcde") == "abcde"  # longer than a slice: alone
    assert not waiting.is_over
    waiting.runs("e")
    assert waiting.is_over


def test_a_sequence_that_leaves_holds_nobody_up() -> None:
    waiting: Resubmission[str] = Resubmission(0.5, lambda: None, Clock())
    waiting.begin({"a": 10, "b": 2_000, "c": 3_000})
    waiting.runs("c")  # aborted before its turn
    waiting.runs("a")
    assert sent(waiting, "b") == "b"
    waiting.runs("b")
    assert waiting.is_over
    waiting.runs("unknown")
