"""A plan is a function of its seed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
