"""Guard time ÷ step time inside a running engine, by number of sequences.

The model is that of `sluice bench engine`, whose greedy sequences never end by themselves; they are asked for fewer
tokens than `min_new_tokens`, so that the guard watches all of them and ends none.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from sluice.bench.engine.model import ensure_model
from sluice.bench.guard.engines import engine
from sluice.bench.guard.plan import DEFAULTS, HOME, Plan
from sluice.bench.guard.work import Work
from sluice.bench.report import say
from sluice.pipeline.errors import SluiceError

_PROMPT = 16  # tokens
_PROMPT_IDS = 256
_ROUNDS = 20  # at most


async def step_share(plan: Plan, home: Path) -> dict[str, Any]:
    """The fields of this part."""
    model = ensure_model(HOME).resolve()
    shares: dict[str, dict[str, float]] = {}
    guard_us: dict[str, dict[str, float]] = {}
    step_ms: dict[str, dict[str, float]] = {}
    for backend in plan.backends:
        shares[backend], guard_us[backend], step_ms[backend] = {}, {}, {}
        async with engine(backend, model, max(plan.counts), home) as running:
            for count in plan.counts:
                steps, spent, elapsed = await _measured(running, count, plan.steps)
                shares[backend][str(count)] = spent / elapsed
                guard_us[backend][str(count)] = spent / steps / 1e3
                step_ms[backend][str(count)] = elapsed / steps / 1e6
                say(f"{backend}, {count} sequences: guard {spent / elapsed:.4f} of a step ({steps} steps)")
    return {"step_share": shares, "guard_us_per_step": guard_us, "step_ms": step_ms}


async def _measured(running: Any, count: int, wanted: int) -> tuple[int, float, float]:
    """Steps, nanoseconds in the guard, nanoseconds in all."""
    steps, spent, elapsed = 0, 0.0, 0.0
    for number in range(_ROUNDS):
        chance = random.Random(number)
        prompts = [[chance.randrange(_PROMPT_IDS) for _ in range(_PROMPT)] for _ in range(count)]
        done = await running.decode(Work(prompts, DEFAULTS.min_new_tokens - 1))
        if any(at is not None for at in done.at_token):
            raise SluiceError("the guard ended a sequence of the cost measurement")
        steps, spent, elapsed = steps + done.steps, spent + done.spent_ns, elapsed + done.elapsed_ns
        if steps >= wanted:
            return steps, spent, elapsed
    raise SluiceError(f"{count} sequences never ran together for {wanted} steps in {_ROUNDS} rounds")
