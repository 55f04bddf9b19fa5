"""A plan is a function of its seed, and is borne in parts."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.soak.parts import Parts
from tests.soak.plan import KINDS, Plan


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
