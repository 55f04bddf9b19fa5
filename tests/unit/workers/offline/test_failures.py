"""What is said of the rows that failed: the first of each kind, and no more than a few lines."""

from __future__ import annotations

from sluice.workers.offline.sinks import Failures


def test_errors_that_differ_in_names_and_numbers_are_of_one_kind() -> None:
    failures = Failures()
    assert (failures.first, failures.lines()) == (None, [])
    for row in (2, 0, 1):
        failures.count(row, f"row {row}: the prompt has {90 + row} tokens")
    failures.count(3, "a/3.png cannot be read\nat all")
    failures.count(4, "'b' cannot be read\nat all")
    failures.count(5, "the disk is full")
    assert failures.first == "row 0: the prompt has 90 tokens"
    assert failures.lines() == [
        "row 0: the prompt has 90 tokens; 2 more",
        "row 3: a/3.png cannot be read at all; 1 more",
        "row 5: the disk is full",
    ]


def test_further_kinds_are_counted_alone() -> None:
    failures = Failures()
    for row, word in enumerate(("one", "two", "three", "four", "five", "three")):
        failures.count(row, f"{word} {'x' * 1000}")
    first, *_, third, last = failures.lines()
    assert first.startswith("row 0: one x")
    assert len(first) < 600
    assert third.endswith("; 1 more")
    assert last == "other errors: 2"
