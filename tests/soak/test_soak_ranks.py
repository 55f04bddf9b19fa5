"""Every rank of four killed in every phase of a step, one after the other."""

from __future__ import annotations

import pytest

from tests.chaos.rank_blows import assert_each_once, start_and_kill
from tests.dying_rank import BESIDE, PHASES
from tests.e2e.fixtures import MakeStack
from tests.e2e.ready_batches import ready_run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]
RANKS = 4


def test_every_rank_killed_in_every_phase_loses_nothing(make_stack: MakeStack) -> None:
    kills = [(phase, victim) for phase in PHASES for victim in range(RANKS)]
    stack = ready_run(make_stack, steps=2 * len(kills))
    for phase, victim in kills:
        start_and_kill(stack, phase, victim, RANKS)
    assert_each_once(stack, 2 * len(kills))


def test_the_same_with_checkpoints_beside_the_steps(make_stack: MakeStack) -> None:
    kills = [(phase, victim) for phase in BESIDE for victim in range(RANKS)]
    trainer = {"keep_checkpoints": 10, "async_checkpoints": True}
    stack = ready_run(make_stack, steps=2 * len(kills), trainer=trainer)
    for phase, victim in kills:
        start_and_kill(stack, phase, victim, RANKS)
    assert_each_once(stack, 2 * len(kills))
