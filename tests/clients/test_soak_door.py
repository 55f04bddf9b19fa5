"""Kills of gateways, rollout servers, workers and the broker under agents of TRL, verifiers and openai, side by side.

`make soak-door` brings 1,000 kills; SLUICE_SOAK_FAULTS, SLUICE_SOAK_MINUTES, SLUICE_SOAK_PARTS and SLUICE_CHAOS_SEED
are those of `make soak`. The last line is a JSON summary.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tests.chaos.blows import chaos_seed
from tests.clients.environments import VERIFIERS, python_with
from tests.e2e.agents import tools_dir
from tests.soak.door import DOOR_EVERY_S, bring_kills
from tests.soak.parts import Parts
from tests.soak.plan import DOOR_KINDS, Plan

__all__ = ["tools_dir"]
FAULTS = int(os.environ.get("SLUICE_SOAK_FAULTS") or 3)
FOR_S = 60 * float(os.environ.get("SLUICE_SOAK_MINUTES") or math.inf)

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(2400 + min(25 * FAULTS, 3 * FOR_S)),
    pytest.mark.skipif("SLUICE_SOAK_FAULTS" not in os.environ, reason="`make soak-door`"),
]


def test_kills_cost_no_agent_a_token(tmp_path: Path, tools_dir: Path) -> None:
    plan = Plan(chaos_seed(), FAULTS, DOOR_KINDS, every_s=DOOR_EVERY_S)
    parts, python = Parts.of_environment(plan), python_with(*VERIFIERS)
    rest = plan[parts.next :]
    done = bring_kills(tmp_path, tools_dir, rest, ("openai", "trl", "verifiers"), python, FOR_S)
    parts.add({"seed": plan.seed, "faults": len(plan), "from": parts.next, **done})
    print(parts.says)
