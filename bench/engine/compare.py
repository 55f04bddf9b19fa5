"""All sides in one run, round by round, and the fields of the JSON object.

- Every side decodes the sequences of a round before the next round begins, each time beginning with another side,
  so a drift of the machine cancels out; a ratio is the median of the rounds' ratios.
- Greedy float32 tokens must be the same on every side, near-ties apart; otherwise the run fails.
- Logs are in a directory of its own, which is removed at the end, also on Ctrl-C.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sluice.bench.engine.plan import PEERS, Plan
from sluice.bench.engine.processes import SideProcesses
from sluice.bench.engine.stats import Round, Sample, check_equal, cpu_ratios, ratios, spread, tokens_equal
from sluice.bench.interruptible import run_interruptible
from sluice.bench.pipeline.plan import HOME
from sluice.bench.report import say

EQUAL_FLOOR = 0.9
_RATIO_NAMES = {"padded": "hf_vs_padded", "continuous": "hf_vs_continuous", "vllm_bare": "vllm_efficiency"}


def compare(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `hf_vs_padded`, `hf_vs_continuous`, `vllm_efficiency`: our rate over the peer's, by count of sequences, null where
    the peer did not run. `by_cpu`: the same by processor time. `tok_s`: useful tokens a second of each side.
    `peak_mb`: most memory of the side's processes (on CUDA: of the allocator). `startup_s`: from the start of the
    process to its first token.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=HOME))
    try:
        return run_interruptible(_run(plan, home))
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _run(plan: Plan, home: Path) -> dict[str, Any]:
    async with SideProcesses(plan, home) as sides:
        rounds: dict[int, list[Round]] = {}
        for count, times in plan.rounds.items():
            rounds[count] = [await _round(plan, sides, number, count) for number in range(times)]
        return {**fields(plan, rounds), "startup_s": sides.startup_s}


async def _round(plan: Plan, sides: SideProcesses, number: int, count: int) -> Round:
    first = number % len(plan.sides)
    found: dict[str, Sample] = {}
    for side in (*plan.sides[first:], *plan.sides[:first]):
        found[side] = await sides.round(side, number, count)
        say(f"{count} sequences, round {number + 1}/{plan.rounds[count]}: {side} {found[side].tok_s:.0f} tok/s")
    return found


def fields(plan: Plan, rounds: Mapping[int, Sequence[Round]]) -> dict[str, Any]:
    """What the rounds come to; raises SluiceError where the sides did not decode the same."""
    peers = {peer: ours for peer, ours in PEERS.items() if peer in plan.sides}
    every = [each for of_count in rounds.values() for each in of_count]
    equal = {peer: tokens_equal(every, ours, peer) for peer, ours in peers.items()}
    check_equal(equal, EQUAL_FLOOR)
    by_peer = {
        _RATIO_NAMES[peer]: {str(count): ratios(of_count, ours, peer) for count, of_count in rounds.items()}
        for peer, ours in peers.items()
    }
    by_cpu = {
        _RATIO_NAMES[peer]: {str(count): median(cpu_ratios(of_count, ours, peer)) for count, of_count in rounds.items()}
        for peer, ours in peers.items()
    }
    rates = {
        side: {str(count): [each[side].tok_s for each in of_count] for count, of_count in rounds.items()}
        for side in plan.sides
    }
    return {
        **{name: _each(by_peer.get(name), median) for name in _RATIO_NAMES.values()},
        "by_cpu": by_cpu,
        "tok_s": {side: _each(by_count, median) for side, by_count in rates.items()},
        "spread": {name: _each(by_count, spread) for name, by_count in {**by_peer, **rates}.items()},
        "tokens_equal": equal,
        "peak_mb": {side: max(each[side].peak_mb for each in every) for side in plan.sides},
        "tokens": {str(count): sum(map(len, of_count[0]["hf"].tokens)) for count, of_count in rounds.items()},
        "rounds": {str(count): len(of_count) for count, of_count in rounds.items()},
        **_conditions(plan),
    }


def _each(by_count: dict[str, list[float]] | None, reduce: Any) -> dict[str, Any] | None:
    return None if by_count is None else {count: reduce(values) for count, values in by_count.items()}


def _conditions(plan: Plan) -> dict[str, Any]:
    import torch
    import transformers

    found = {
        "longest": plan.longest,
        "threads": plan.threads,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": plan.model.name,
    }
    return found if plan.vllm else {**found, "why_no_vllm": plan.why_no_vllm}
