"""Every rank of four killed in every phase of a step, one after the other."""

from __future__ import annotations

import pytest

from tests.chaos.rank_blows import assert_each_once, start_and_kill
from tests.dying_rank import BESIDE, PHASES
from tests.e2e.fixtures import MakeStack
from tests.e2e.ready_batches import ready_run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]
RANKS = 4


@pytest.mark.parametrize("phase", [*PHASES, *BESIDE])
def test_every_rank_killed_in_a_phase_loses_nothing(make_stack: MakeStack, phase: str) -> None:
    trainer = {"keep_checkpoints": 10, "async_checkpoints": phase in BESIDE}
    stack = ready_run(make_stack, steps=2 * RANKS, trainer=trainer)
    for victim in range(RANKS):
        start_and_kill(stack, phase, victim, RANKS)
    assert_each_once(stack, 2 * RANKS)
