"""All parts, one after the other, and the fields of the JSON object.

Logs, runs and brokers are in a directory of their own, which is removed at the end, also on Ctrl-C.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.guard.engines import THREADS
from sluice.bench.guard.plan import DEFAULTS, HOME, Plan
from sluice.bench.guard.pure import ns_per_token
from sluice.bench.guard.runs import runs
from sluice.bench.guard.saved import saved
from sluice.bench.guard.step_share import step_share
from sluice.bench.interruptible import run_interruptible
from sluice.bench.report import say

_STREAM = 2048  # tokens


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `step_share`: guard time over step time inside the engine's process, by backend and number of sequences.
    `ns_per_token`, `naive_ns_per_token`, `upstream_ns_per_token`: of the rule alone, see `sluice.bench.guard.pure`;
    `any_period_ns_per_token` and `object_keys_ns_per_token` with that one key more.
    `saved_share`: tail tokens that the guard saves over those of an oracle, see `sluice.bench.guard.workload`;
    `saved_share_any_period`: the same with that key; `saved_share_ceiling`: what any rule could that is armed after
    `min_new_tokens`.
    `trained_per_s`, `tokens`: of whole runs without the guard and with it; `triggered` and `tokens_saved` of the
    second by its own metrics. Null where a part did not run.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=HOME)).resolve()
    try:
        pure = ns_per_token(plan.rounds, _STREAM, vllm="vllm" in plan.backends)
        say("ns a token: " + ", ".join(f"{name} {value}" for name, value in pure["ns_by_stream"].items()))
        found = run_interruptible(_in_engines(plan, home))
        whole: dict[str, Any] = {"trained_per_s": None, "tokens": None}
        if plan.run_sequences:
            whole = runs(plan, home)
        return {**found, **pure, **whole, **_conditions(plan)}
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _in_engines(plan: Plan, home: Path) -> dict[str, Any]:
    return {**await step_share(plan, home), **await saved(plan, home)}


def _conditions(plan: Plan) -> dict[str, Any]:
    found = {
        "thresholds": msgspec.to_builtins(DEFAULTS),
        "stream_tokens": _STREAM,
        "sequences": plan.sequences,
        "longest": plan.longest,
        "run_sequences": plan.run_sequences,
        "run_longest": plan.run_longest,
        "threads": THREADS,
    }
    return found if plan.why_no_vllm is None else {**found, "why_no_vllm": plan.why_no_vllm}
