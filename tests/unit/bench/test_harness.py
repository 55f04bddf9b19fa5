"""What all benchmarks share: rounds in turns, checked options, and children that are asked by messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.bench.harness import BenchPlan, aim, play, ratios
from sluice.bench.processes import Fleet
from sluice.pipeline.errors import ConfigError, DeadlineExceeded, SluiceError
from tests.benches import ROOT, serve_shares
from tests.deadlines import HANG_S


async def test_each_round_begins_with_another_side_and_ratios_go_round_by_round() -> None:
    order: list[tuple[str, int]] = []

    async def one(side: str, number: int) -> float:
        order.append((side, number))
        return {"ours": 6.0, "theirs": 2.0 + number}[side]

    rounds = await play(3, ("ours", "theirs"), one)
    assert order == [("ours", 0), ("theirs", 0), ("theirs", 1), ("ours", 1), ("ours", 2), ("theirs", 2)]
    assert ratios(rounds, "ours", "theirs", float) == [3.0, 2.0, 1.5]
    assert ratios([{"ours": 1.0, "theirs": 0.0}], "ours", "theirs", float) == [0.0]


async def test_a_round_that_is_refused_ends_the_benchmark() -> None:
    async def one(side: str, number: int) -> int:
        return number

    def ended(number: int, found: object) -> None:
        if number == 1:
            raise SluiceError("ratios would be unfair")

    with pytest.raises(SluiceError, match="fair"):
        await play(3, ("ours", "theirs"), one, ended)


class Sizes(BenchPlan, frozen=True, kw_only=True):
    counts: tuple[int, ...] = (1, 2)
    rounds: int = 3
    longest: int = 512
    pause_s: float = 4.0
    vllm: bool = True

    QUICK = {"rounds": 1, "longest": 64, "pause_s": 0.5}
    BOUNDS = {"longest": (8, 512)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "--rounds must be at least 1, got 0"),
        ({"counts": ()}, r"--counts must be at least 1, got \(\)"),
        ({"counts": (2, 0)}, r"--counts must be at least 1, got \(2, 0\)"),
        ({"pause_s": 0.5}, "--pause-s must be at least 1, got 0.5"),
        ({"longest": 513}, "--longest must be 8 to 512, got 513"),
    ],
)
def test_options_out_of_bounds_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sizes.of(**options)


def test_a_quick_plan_takes_no_more_than_its_bounds() -> None:
    assert Sizes.of(rounds=None, vllm=False) == Sizes(vllm=False)
    assert Sizes.of(quick=True) == Sizes(rounds=1, longest=64, pause_s=0.5)
    assert Sizes.of(quick=True, longest=16, rounds=7, counts=(5,)) == Sizes(
        counts=(5,), rounds=1, longest=16, pause_s=0.5
    )
    assert Sizes.of(vllm=False).why_no_vllm == "not asked for"


async def test_rounds_that_warm_up_are_checked_and_not_counted() -> None:
    checked: list[int] = []

    async def one(side: str, number: int) -> int:
        return number

    assert await play(2, ("ours",), one, lambda number, _: checked.append(number), warm=1) == [{"ours": 0}, {"ours": 1}]
    assert checked == [-1, 0, 1]


@pytest.mark.parametrize(("sign", "met"), [("<=", (True, True, False)), (">=", (False, True, True))])
def test_an_aim_is_met_at_its_bound(sign: str, met: tuple[bool, ...]) -> None:
    assert tuple(aim(sign, 2.0, found)["met"] for found in (1.0, 2.0, 3.0)) == met
    assert aim(sign, 2.0, None) == {"aim": f"{sign} 2.0", "found": None, "met": None}


async def test_children_answer_in_order_and_say_what_they_raised(tmp_path: Path) -> None:
    async with Fleet("share", tmp_path) as fleet:
        for number in (6, 12):
            await fleet.start_child(serve_shares, [number], {"PYTHONPATH": str(ROOT)})
        assert await fleet.ask(3, float, HANG_S) == [2.0, 4.0]
        assert await fleet.ask(2, float, HANG_S) == [3.0, 6.0]
        with pytest.raises(SluiceError, match="share-0 failed: ZeroDivisionError"):
            await fleet.ask(0, float, HANG_S)
    assert [process.returncode is not None for process in fleet.processes] == [True, True]
    assert "what a library says" in (tmp_path / "share-1.log").read_text()


async def test_a_child_that_neither_answers_nor_computes_is_given_up(tmp_path: Path) -> None:
    async with Fleet("share", tmp_path) as fleet:
        await fleet.start_child(serve_shares, [1], {"PYTHONPATH": str(ROOT)})
        with pytest.raises(DeadlineExceeded, match="a share process was silent and idle"):
            await fleet.started(0.5)
        assert fleet.processes[0].returncode is None


async def test_a_child_that_fails_as_it_starts_says_why(tmp_path: Path) -> None:
    async with Fleet("share", tmp_path) as fleet:
        await fleet.start_child(serve_shares, [6], {"PYTHONPATH": str(ROOT)})
        fleet.send(0)
        with pytest.raises(SluiceError, match="share-0 failed: ZeroDivisionError"):
            await fleet.started()
