"""Four operations that agree with Python's numbers and never evaluate anything."""

from __future__ import annotations

import asyncio
import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.producers.agents.tools import ToolBox
from sluice.producers.agents.tools.registry import calculator

BOX = ToolBox(calculator((0, 0)), 20)
WHOLE = st.integers(-(10**400), 10**400)


def answers(*asked: tuple[str, Any]) -> list[str]:
    calls = [{"id": "c", "function": {"name": name, "arguments": arguments}} for name, arguments in asked]
    return [message["content"] for message in asyncio.run(BOX.run(calls))]


def answer(name: str, arguments: Any) -> str:
    return answers((name, arguments))[0]


@settings(deadline=None, max_examples=50)
@given(WHOLE, WHOLE)
def test_whole_numbers_are_exact(a: int, b: int) -> None:
    for arguments in ({"a": a, "b": b}, json.dumps({"a": a, "b": b}), {"a": str(a), "b": f" {b} "}):
        found = answers(("add", arguments), ("subtract", arguments), ("multiply", arguments))
        assert found == [str(a + b), str(a - b), str(a * b)]
    if b:
        assert answer("divide", {"a": a * b, "b": b}) == str(a)


@settings(deadline=None, max_examples=50)
@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_others_are_pythons_floats(a: float, b: float) -> None:
    assert float(answer("add", {"a": a, "b": b})) == a + b
    assert float(answer("multiply", {"a": str(a), "b": b})) == a * b
    quotient = answer("divide", {"a": a, "b": b})
    if b == 0:
        assert quotient == "Error: cannot divide by zero; use another divisor"
    elif not quotient.startswith("Error: "):
        assert float(quotient) == a / b


@settings(deadline=None, max_examples=50)
@given(st.integers(-(10**15), 10**15), st.integers(1, 10**6))
def test_a_whole_quotient_has_no_decimals(a: int, b: int) -> None:
    quotient = answer("divide", {"a": float(a), "b": b})
    if Fraction(a, b).denominator == 1:
        assert quotient == str(a // b)
    assert not quotient.endswith(".0")


@pytest.mark.parametrize(
    ("name", "a", "b", "result"),
    [
        ("add", 2, 3, "5"),
        ("add", 2.5, 0.5, "3"),
        ("add", 0.1, 0.2, "0.30000000000000004"),
        ("subtract", "3", "0.5", "2.5"),
        ("multiply", 15, 23, "345"),
        ("multiply", -0.0, 1, "0"),
        ("divide", 7, 2, "3.5"),
        ("divide", 10**300, 10**299, "10"),
        ("divide", 0, 5, "0"),
    ],
)
def test_examples(name: str, a: Any, b: Any, result: str) -> None:
    assert answer(name, {"a": a, "b": b}) == result


@pytest.mark.parametrize("zero", [0, 0.0, -0.0, "0", "0.0", "-0"])
def test_nothing_is_divided_by_zero(zero: Any) -> None:
    assert answer("divide", {"a": 1, "b": zero}) == "Error: cannot divide by zero; use another divisor"


@pytest.mark.parametrize(
    ("name", "a", "b", "reason"),
    [
        ("add", math.nan, 1, "must be a finite number"),
        ("add", 1, math.inf, "b must be a finite number"),
        ("add", "nan", 1, "must be a finite number"),
        ("add", "-inf", 1, "must be a finite number"),
        ("add", "1e999", 1, "must be a finite number"),
        ("add", 10**1000, 1, "must be a finite number"),
        ("add", "9" * 100_000, 1, "needs a number as a"),
        ("multiply", 10**999, 10**999, "too large"),
        ("multiply", 1e300, 1e300, "too large"),
        ("add", 10**999, 0.5, "too large"),
        ("divide", 10**999, 0.5, "too large"),
        ("divide", 1e300, 1e-300, "too large"),
        ("add", "__import__('os').getpid()", 1, "needs a number as a"),
        ("add", "1+1", 1, "needs a number as a"),
        ("add", "0x10", 1, "needs a number as a"),
        ("add", "", 1, "needs a number as a"),
        ("add", True, 1, "needs a number as a"),
        ("add", None, 1, "needs a number as a"),
        ("add", [1], 1, "needs a number as a"),
        ("add", {"a": 1}, 1, "needs a number as a"),
    ],
)
def test_what_has_no_answer_is_explained(name: str, a: Any, b: Any, reason: str) -> None:
    content = answer(name, {"a": a, "b": b})
    assert content.startswith("Error: ")
    assert reason in content
    assert len(content) < 300


@pytest.mark.parametrize("arguments", ['{"a": NaN, "b": 1}', '{"a": 1e999, "b": 1}', '{"a": -Infinity, "b": 1}'])
def test_json_has_no_way_around(arguments: str) -> None:
    assert "must be a finite number" in answer("add", arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"), [({"a": 1}, "needs a number as b"), ({"a": 1, "b": 2, "c": 3}, "no argument 'c'")]
)
def test_missing_and_unknown_arguments_are_named(arguments: Any, reason: str) -> None:
    assert reason in answer("add", arguments)


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["add", "subtract", "multiply", "divide"]),
    st.dictionaries(st.text(max_size=3), st.text(max_size=9)),
)
def test_nothing_breaks_it(name: str, arguments: dict[str, str]) -> None:
    assert isinstance(answer(name, arguments), str)


async def test_the_delay_is_within_its_bounds() -> None:
    box = ToolBox(calculator((20, 30)), 20)
    started = asyncio.get_running_loop().time()
    await box.run([{"id": "c", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}])
    assert asyncio.get_running_loop().time() - started >= 0.02
