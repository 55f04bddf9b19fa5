"""An engine with the guard, in a process of its own, and its guard time ÷ step time by number of sequences.

- The guard's cost is taken by the engine itself, inside its process, and read every quarter of a second. What counts
  are the intervals in which every step had all sequences: no prefill, no sequence that has ended.
- The share of a step is measured with a model whose greedy sequences never end by themselves; they are asked for fewer
  tokens than `min_new_tokens`, so that the guard watches all of them and ends none.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.child import Parent
from sluice.bench.guard.rule_cost import DEFAULTS
from sluice.bench.harness import HOME, say
from sluice.bench.models import endless_model
from sluice.bench.processes import START_S, Fleet, enforce_eager, engine_environment
from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest
from sluice.workers.guard.watch import GuardCost

THREADS = 1
_INTERVAL_S = 0.25
_PROMPT, _PROMPT_IDS = 16, 256  # tokens; the byte tokens
_ROUNDS = 20  # at most


class Work(msgspec.Struct, frozen=True):
    """Greedy sequences, all at once, each of `num_new_tokens` unless it ends before."""

    prompts: list[list[int]]
    num_new_tokens: int


class Done(msgspec.Struct, frozen=True):
    """By sequence: its tokens, and how many came before the one that the guard forced (None: it ended otherwise).

    The guard's cost over the steps in which every sequence ran: its own time, and that of whole steps.
    """

    tokens: list[list[int]]
    at_token: list[int | None]
    steps: int = 0
    spent_ns: float = 0.0
    elapsed_ns: float = 0.0


class Engine:
    """One that is loaded, in its process."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def decode(self, work: Work) -> Done:
        """Raises SluiceError when the process ended."""
        return (await self._fleet.ask(work, Done))[0]


@contextlib.asynccontextmanager
async def engine(
    backend: str, model: Path, max_batch: int, logs: Path, thresholds: RepeatTerminateConfig = DEFAULTS
) -> AsyncIterator[Engine]:
    """Started and warm; it ends with the block."""
    arguments = [backend, str(model), max_batch, msgspec.to_builtins(thresholds)]
    async with Fleet(f"{backend}-{model.name}", logs) as fleet:
        await fleet.start_child(serve, arguments, engine_environment(THREADS))
        await fleet.receive(dict, START_S)
        found = Engine(fleet)
        await found.decode(Work([[1, 2, 3]], 16))
        yield found


async def serve(parent: Parent, name: str, model: str, max_batch: int, thresholds: dict[str, Any]) -> None:
    """The engine's process: it loads and answers `{}`; then each request is a Work, answered with a Done."""
    import torch

    torch.set_num_threads(THREADS)
    backend = _make_backend(name, model, max_batch, msgspec.convert(thresholds, RepeatTerminateConfig))
    await backend.start()
    parent.tell({})
    async for work in parent.requests(Work):
        parent.tell(await _decode(backend, work))
    await backend.close()


def _make_backend(name: str, model: str, max_batch: int, thresholds: RepeatTerminateConfig) -> Any:
    settings = ModelConfig(path=model, dtype="float32")
    if name == "hf":
        from sluice.workers.engine.hf import HfBackend

        return HfBackend(settings, max_batch=max_batch, repeat_terminate=thresholds)
    from sluice.workers.engine.vllm import VllmBackend

    options = VllmEngineOptions(enforce_eager=enforce_eager())
    return VllmBackend(settings, max_batch=max_batch, options=options, repeat_terminate=thresholds)


async def _decode(backend: Any, work: Work) -> Done:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=work.num_new_tokens)
    asks = [SequenceRequest(str(number), tuple(prompt), sampling) for number, prompt in enumerate(work.prompts)]
    tasks = [asyncio.create_task(backend.decode(ask)) for ask in asks]
    waiting, steady = set[asyncio.Task[SequenceOutput]](tasks), list[GuardCost]()
    while waiting:
        _, waiting = await asyncio.wait(waiting, timeout=_INTERVAL_S)
        cost: GuardCost = await backend.guard_cost()
        if cost.steps > 1 and cost.tokens == cost.steps * len(asks):
            steady.append(cost)
    outputs = [task.result() for task in tasks]
    return Done(
        [output.token_ids for output in outputs],
        [None if output.trigger is None else output.trigger.at_token for output in outputs],
        sum(cost.steps for cost in steady),
        sum(cost.spent_ns for cost in steady),
        # of k steps in an interval, k - 1 have another one before them
        sum(cost.elapsed_ns * cost.steps / (cost.steps - 1) for cost in steady),
    )


async def step_share(backends: Sequence[str], counts: Sequence[int], steps: int, home: Path) -> dict[str, Any]:
    """Of at least so many steps of each backend, by number of sequences."""
    model = endless_model(HOME)
    fields: dict[str, dict[str, dict[str, float]]] = {"step_share": {}, "guard_us_per_step": {}, "step_ms": {}}
    for backend in backends:
        for of_backend in fields.values():
            of_backend[backend] = {}
        async with engine(backend, model, max(counts), home) as running:
            for count in counts:
                taken, spent, elapsed = await _measured(running, count, steps)
                fields["step_share"][backend][str(count)] = spent / elapsed
                fields["guard_us_per_step"][backend][str(count)] = spent / taken / 1e3
                fields["step_ms"][backend][str(count)] = elapsed / taken / 1e6
                say(f"{backend}, {count} sequences: guard {spent / elapsed:.4f} of a step ({taken} steps)")
    return fields


async def _measured(running: Engine, count: int, wanted: int) -> tuple[int, float, float]:
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
