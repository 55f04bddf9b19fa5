"""Faults of every kind, drawn from a seed, against a run of real processes: nothing is lost, nothing counts twice.

`make soak` brings 200 faults; SLUICE_SOAK_FAULTS sets the number, SLUICE_CHAOS_SEED repeats a plan. The last line is
a JSON summary. The bound on recovery is checked in a long run only, and for kills with a second worker at hand.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.chaos.blows import chaos_seed
from tests.soak.plan import Plan
from tests.soak.soak_run import LEASE_S, SoakRun
from tests.soak.verdict import Verdict

FAULTS = int(os.environ.get("SLUICE_SOAK_FAULTS") or 3)
_LONG = 60  # faults; from here on it is a soak with more processes
_END_S = 240.0

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(400 + 25 * FAULTS),
    pytest.mark.skipif("SLUICE_SOAK_FAULTS" not in os.environ, reason="`make soak`; tests/chaos has random kills"),
]


def test_faults_lose_nothing_and_repeat_nothing(tmp_path: Path, spinning_model: Path) -> None:
    plan = Plan(chaos_seed(), FAULTS)
    long = FAULTS >= _LONG
    run = SoakRun(tmp_path, spinning_model, workers=3 if long else 2, consumers=2 if long else 1)
    try:
        run.endure(plan)
        verdict = Verdict(run, run.finish(_END_S))
        try:
            verdict.assert_all()
            if long:
                run.witness.recoveries.assert_within(LEASE_S)
        finally:
            print(json.dumps({"seed": plan.seed, "faults": len(plan), "by_kind": plan.by_kind(), **verdict.summary()}))
    except BaseException:
        print(f"SLUICE_CHAOS_SEED={plan.seed} SLUICE_SOAK_FAULTS={FAULTS}\n{run.report()}")
        raise
    finally:
        run.close()
