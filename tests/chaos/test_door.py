"""30 kills of gateways, rollout servers, workers and the broker under agents of the openai package.

TRL's worker and verifiers' client are not in this one, whose environments and imports would take longer than the kills:
`make soak-door` has all three. Most kills don't wait until their victim has started again, as that takes seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.blows import chaos_seed
from tests.deadlines import RUN_S
from tests.e2e.agents import tools_dir
from tests.soak.door import DOOR_EVERY_S, bring_kills
from tests.soak.plan import DOOR_KINDS, Plan

__all__ = ["tools_dir"]
# The start, the kills, the clients' end, that of the run, the audit.
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(5 * RUN_S)]


def test_thirty_kills_cost_the_openai_client_no_token(tmp_path: Path, tools_dir: Path) -> None:
    bring_kills(tmp_path, tools_dir, Plan(chaos_seed(), 30, DOOR_KINDS, every_s=DOOR_EVERY_S, eager=0.7), ("openai",))
