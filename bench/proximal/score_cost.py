"""What the scores of an update cost: three kinds of it in turns, over the same rows.

| kind      | what is timed                                                                                |
|-----------|----------------------------------------------------------------------------------------------|
| scored    | v -> v + 1: pause, load, the prefill that rebuilds the cache and scores every generated token |
| recompute | v -> v + 2: the same, and nothing is scored, as no token is of the version before             |
| none      | a decode step of the same rows                                                                |

- Of an update the clock runs from the last token before it (or the call, if that comes later) to the first token of
  the last row after it. No probe is scored and no digest is checked: they would hide the difference.
- Ratios are medians of the rounds' ratios; `by_cpu` compares processor seconds over all rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sluice.bench.engine.model import CONTEXT
from sluice.bench.engine.usage import cpu_s
from sluice.bench.proximal.plan import Sizes
from sluice.bench.proximal.rows import requests, running
from sluice.bench.proximal.versions import Variants
from sluice.pipeline.errors import SluiceError
from sluice.workers.engine.contracts import Backend, SequenceOutput

STEPS = {"scored": 1, "recompute": 2}
KINDS = (*STEPS, "none")
_SETTLED = 2  # steps that all rows have made before anything is timed


@dataclass(frozen=True)
class Sample:
    """Wall and processor seconds: of an update, or of one step."""

    seconds: float
    cpu_s: float


Round = dict[str, Sample]
"""By kind."""


async def score_cost(backend: Backend, variants: Variants, sizes: Sizes) -> dict[str, Any]:
    """The fields of one backend."""
    rounds: list[Round] = []
    for number in range(-1, sizes.rounds):  # the first one warms up
        first = number % len(KINDS)
        order = (*KINDS[first:], *KINDS[:first])
        found = {kind: await _one(backend, variants, sizes, kind, number * len(KINDS)) for kind in order}
        rounds += [found] if number >= 0 else []
    return fields(rounds)


def fields(rounds: Sequence[Round]) -> dict[str, Any]:
    """What the rounds come to."""
    costs = [each["scored"].seconds / each["recompute"].seconds for each in rounds]
    cpu = {kind: sum(each[kind].cpu_s for each in rounds) for kind in STEPS}
    return {
        "vs_kv_recompute": median(costs),
        "vs_no_update": median(each["scored"].seconds / each["none"].seconds for each in rounds),
        "by_cpu": cpu["scored"] / cpu["recompute"] if cpu["recompute"] else None,
        "spread": [min(costs), max(costs)],
        "seconds": {kind: median(each[kind].seconds for each in rounds) for kind in KINDS},
        "rounds": len(rounds),
    }


async def _one(backend: Backend, variants: Variants, sizes: Sizes, kind: str, seed: int) -> Sample:
    version = backend.version
    room = CONTEXT - sizes.prompt - sizes.generated  # on vLLM some rows run far ahead while others are prefilled
    asks = requests(version, sizes.prompt, [sizes.generated] * sizes.rows, room, seed + KINDS.index(kind))
    async with running(backend, asks) as rows:
        await rows.until(lambda: rows.steps() >= _SETTLED, "the rows to run")
        if kind == "none":
            begin = rows.ready + _SETTLED * rows.count
            end = begin + sizes.step_count * rows.count
            await rows.until(lambda: len(rows.times) > end, "steps")
            return Sample((rows.times[end] - rows.times[begin]) / sizes.step_count, 0.0)
        newer = version + STEPS[kind]
        called, used = time.perf_counter(), cpu_s()
        await backend.load_weights(variants.directory(newer), newer)
        await rows.until(lambda: rows.turned(newer), f"tokens of version {newer}")
        used, turn = cpu_s() - used, rows.turns[newer]
    _check(rows.outputs, version, newer)
    return Sample(max(turn.rows.values()) - max(called, turn.before), used)


def _check(outputs: Sequence[SequenceOutput], version: int, newer: int) -> None:
    """Raises SluiceError unless exactly the tokens that should be are scored."""
    expected = newer if newer == version + 1 else -1
    for output in outputs:
        marks = output.proximal_versions or [-1] * len(output.token_ids)
        proximal = output.proximal_logprobs or output.logprobs
        wrong = [at for at, of in enumerate(output.versions) if marks[at] != (expected if of == version else -1)]
        if wrong or version not in output.versions or not all(map(math.isfinite, proximal)):
            raise SluiceError(f"{output.seq_key}: {len(wrong)} tokens are not scored as v{version} -> v{newer} does it")
