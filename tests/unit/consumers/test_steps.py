"""Groups of a deterministic run wait for their step."""

from __future__ import annotations

from itertools import permutations

import pytest

from sluice.consumers.groups import Steps
from sluice.pipeline.queue import StepRow


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_step_is_whole_with_its_last_row_and_in_the_order_of_its_rows(order: tuple[int, ...]) -> None:
    steps = Steps[str]()
    assert steps.add(StepRow(7, 1, 2), "of another step") is None
    *first, last = order
    for row in first:
        assert steps.add(StepRow(4, row, 3), f"row {row}") is None
        assert steps.holds(StepRow(4, row, 3))
    assert steps.open == [4, 7]
    assert sorted(steps) == sorted(["of another step", *(f"row {row}" for row in first)])
    assert steps.add(StepRow(4, last, 3), f"row {last}") == ["row 0", "row 1", "row 2"]
    assert steps.open == [7]
    assert steps.take(7) == ["of another step"]
    assert list(steps) == []
