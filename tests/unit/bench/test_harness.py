"""What all benchmarks share: rounds in turns, checked options, and children that are asked by messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.bench.harness import at_least_one, play, ratios
from sluice.bench.processes import Fleet
from sluice.pipeline.errors import ConfigError, SluiceError
from tests.benches import ROOT, serve_shares


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


def test_options_below_one_are_named() -> None:
    at_least_one(rounds=None, counts=(1, 2))
    with pytest.raises(ConfigError, match="--rounds must be at least 1, got 0"):
        at_least_one(rounds=0)
    with pytest.raises(ConfigError, match="--counts, --rounds and --max-batch must be at least 1"):
        at_least_one(counts=(), rounds=None, max_batch=1)


async def test_children_answer_in_order_and_say_what_they_raised(tmp_path: Path) -> None:
    async with Fleet("share", tmp_path) as fleet:
        for number in (6, 12):
            await fleet.start_child(serve_shares, [number], {"PYTHONPATH": str(ROOT)})
        assert await fleet.ask(3, float, 60) == [2.0, 4.0]
        assert await fleet.ask(2, float, 60) == [3.0, 6.0]
        with pytest.raises(SluiceError, match="share-0 failed: ZeroDivisionError"):
            await fleet.ask(0, float, 60)
    assert [process.returncode is not None for process in fleet.processes] == [True, True]
    assert "what a library says" in (tmp_path / "share-1.log").read_text()
