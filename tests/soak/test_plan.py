"""A plan is a function of its seed, and is borne in parts, which add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.parts import Parts, report
from tests.soak.plan import KINDS, Plan
from tests.soak.recovery import Recoveries, Recovery


@given(seed=st.integers(0, 2**32), count=st.integers(1, 300))
def test_the_same_seed_gives_the_same_plan(seed: int, count: int) -> None:
    plan = Plan(seed, count)
    assert plan == Plan(seed, count)
    assert [fault.number for fault in plan] == list(range(count))
    assert sum(plan.by_kind().values()) == count
    assert all(0 < fault.hold_s <= max(0.1, KINDS[fault.kind].longest_s) for fault in plan)


@given(seed=st.integers(0, 2**32))
def test_every_kind_is_there_and_another_seed_gives_another_plan(seed: int) -> None:
    plan = Plan(seed, len(KINDS))
    assert plan.by_kind() == dict.fromkeys(KINDS, 1)
    assert plan != Plan(seed + 1, len(KINDS))


def test_a_soak_has_many_faults_of_every_kind() -> None:
    found = Plan(1, 1000).by_kind()
    assert set(found) == set(KINDS)
    assert min(found.values()) >= 3


def test_a_part_begins_where_the_last_one_of_its_plan_ended(tmp_path: Path) -> None:
    file = tmp_path / "soaks" / "parts.jsonl"
    assert Parts(Plan(7, 100), file).next == 0
    for done, skipped in ((40, 3), (35, 0)):
        Parts(Plan(7, 100), file).add({"seed": 7, "faults": 100, "done": done, "skipped": skipped})
    Parts(Plan(8, 100), file).add({"seed": 8, "faults": 100, "done": 9, "skipped": 0})
    parts = Parts(Plan(7, 100), file)
    assert (parts.next, parts.says) == (75, "75 of 100 faults of seed 7 in 2 parts, 3 of them skipped")
    parts.add({"seed": 7, "faults": 100, "done": 25, "skipped": 0})
    assert Parts(Plan(7, 100), file).next == 0
    assert Parts(Plan(7, 100), None).next == 0


def part(done: int, clean_s: list[float], slowest_s: float) -> dict[str, Any]:
    return {
        "seed": 7, "faults": 100, "done": done, "skipped": 1, "overlapping": 2, "faults_s": 5.0 * done, "lease_s": 3.0,
        "by_kind": {"kill worker": done}, "lost": 0, "twice": 0, "recovery": {"clean_s": clean_s},
        "sequences": {"enqueued": 1000, "trained": 990, "dead": 4, "dropped": 6},
        "why": {"looks": 50, "named": 1, "slowest_named_s": slowest_s, "hidden": 2, "standstills": 3, "loading": 1,
                "problems": 0},
    }  # fmt: skip


def test_parts_add_up_to_one_table(tmp_path: Path) -> None:
    parts = Parts(Plan(7, 100), tmp_path / "parts.jsonl")
    parts.add(part(60, [3.0, 9.0], 4.5))
    parts.add(part(40, [3.5], 8.1))
    assert parts.clean_s == [3.0, 9.0, 3.5]
    table = report(parts.done)
    for expected in (
        "100 of 100 (seed 7); 2; 2 |",
        "5.0; 4 |",
        "2,000 = 1,980 + 8 + 12",
        "3.50 s of 3; 9.00 s",
        "2; 8.1 s; 4",
    ):
        assert expected in table, table


def test_the_median_of_a_deaths_recoveries_is_held_against_the_lease() -> None:
    recoveries = Recoveries([Recovery("worker-0", 0.0, {}, clean=True, took_s=took_s) for took_s in (3.9, 4.2)])
    recoveries.assert_within(3.0)  # of two, the median says nothing
    recoveries.assert_within(3.0, [3.1, 3.5, 3.9])
    with pytest.raises(AssertionError, match=r"median 4\.20"):
        recoveries.assert_within(3.0, [3.1, 4.4, 4.5])
    recoveries.all.append(Recovery("worker-1", 0.0, {}, clean=False, took_s=60.0))
    recoveries.assert_within(3.0, [3.1, 3.5, 3.9])
    recoveries.all[-1].clean = True
    with pytest.raises(AssertionError, match="later than"):
        recoveries.assert_within(3.0, [3.1, 3.5, 3.9])
