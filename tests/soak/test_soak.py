"""Faults of every kind, drawn from a seed, against a run of real processes: nothing is lost, nothing counts twice.

`make soak` brings 200 faults; SLUICE_SOAK_FAULTS sets the number, SLUICE_CHAOS_SEED repeats a plan. With
SLUICE_SOAK_MINUTES no fault comes later than that; the next soak with this seed and number goes on where this one
ended, and the parts are summed up in SLUICE_SOAK_PARTS, one line each (`parts.py` makes a table of them). The last
line is a JSON summary; what the asker saw is kept in evidence.json (`explanation.py` judges it again). The bound on
recovery is checked in a long run only, for kills with a second worker at hand, over all parts. With root, each role has
a host of its own (`site.py`); without, faults that need one are skipped by name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.chaos.blows import chaos_seed
from tests.deadlines import RUN_S
from tests.soak.adversary import Blow
from tests.soak.explanation import Findings, judge, save
from tests.soak.parts import Parts, report
from tests.soak.plan import Plan
from tests.soak.site import Site, why_none
from tests.soak.soak_run import LEASE_S, BrokerKind, SoakRun, detection_soak, lots_of
from tests.soak.verdict import Verdict

FAULTS = int(os.environ.get("SLUICE_SOAK_FAULTS") or 3)
BROKER: BrokerKind = msgspec.convert(os.environ.get("SLUICE_SOAK_BROKER") or "single", BrokerKind)
FOR_S = 60 * float(os.environ.get("SLUICE_SOAK_MINUTES") or math.inf)
_LONG = 60  # faults; from here on it is a soak with more processes

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(3 * RUN_S + min(25 * FAULTS, 3 * FOR_S)),
    pytest.mark.skipif("SLUICE_SOAK_FAULTS" not in os.environ, reason="`make soak`; tests/chaos has random kills"),
]


def test_faults_lose_nothing_and_repeat_nothing(tmp_path: Path, spinning_model: Path) -> None:
    plan, long = Plan(chaos_seed(), FAULTS), FAULTS >= _LONG
    parts = Parts.of_environment(plan)
    workers, consumers = (3, 2) if long else (2, 1)
    if reason := why_none():
        print(f"one host for all: {reason}")
    site = None if reason else Site(tmp_path, workers, consumers)
    try:
        many = {"workers": workers, "consumers": consumers}
        run = detection_soak(tmp_path, spinning_model, **many, site=site, broker=BROKER)
        try:
            endure(run, plan, parts, long=long)
        except BaseException:
            print(f"SLUICE_CHAOS_SEED={plan.seed} SLUICE_SOAK_FAULTS={FAULTS}\n{run.report()}")
            raise
        finally:
            run.close()
    finally:
        if site is not None:
            site.close()


def endure(run: SoakRun, plan: Plan, parts: Parts, *, long: bool) -> None:
    """One part: its faults, its end, its verdict; it is noted as done only if it passes."""
    rest = plan[parts.next :]
    done = rest[: run.endure(rest, FOR_S)]
    looks, blows = run.asker.looks, run.adversary.blows
    save(run.stack.directory / "evidence.json", looks, blows)
    explained = judge(looks, blows)
    verdict = Verdict(run, run.finish(RUN_S), lots_of(run))
    summary: dict[str, Any] = {}
    try:
        verdict.assert_all()
        if long:
            run.witness.recoveries.assert_within(LEASE_S, parts.clean_s)
        assert_explained(explained)
        summary["passed"] = True
    finally:
        skipped = run.adversary.skipped
        summary["broker"] = BROKER
        summary |= {"seed": plan.seed, "faults": len(plan), "from": parts.next, "done": len(done)}
        summary |= {"skipped": len(skipped), "by_kind": Plan.counted(done), "why": explained.summary()}
        summary |= {"overlapping": overlapping(blows), "faults_s": round(run.faults_s, 1)}
        print(json.dumps({**summary, **verdict.summary()}))
    parts.add({**summary, **verdict.summary()})
    print(parts.says, report(parts.done), sep="\n")


def assert_explained(found: Findings) -> None:
    """Every cause that was named was right, and whatever stood still was explained in time."""
    assert not found.problems, "\n\n".join([f"{len(found.problems)} problems", *found.problems[:8]])


def overlapping(blows: Sequence[Blow]) -> int:
    """How many faults came while an earlier one still held."""
    held = [(blow.began, blow.ended if blow.ended is not None else math.inf) for blow in blows if blow.heal is not None]
    return sum(any(began < blow.began < ended for began, ended in held) for blow in blows)
