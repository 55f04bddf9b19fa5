"""One engine with the guard in a process of its own.

- `python -m sluice.bench.guard.child BACKEND MODEL THREADS MAX_BATCH THRESHOLDS`, the last the subtree as JSON.
- It loads its engine and answers `{}`; then each line on stdin is a Work, answered with a Done.
- Answers go to the stdout it was started with; whatever libraries print goes to its log.
- The guard's cost is taken by the engine itself, inside its process, and read every quarter of a second. What counts
  are the intervals in which every step had all sequences: no prefill, no sequence that has ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import IO, Any

import msgspec

from sluice.bench.guard.work import Done, Work
from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from sluice.workers.guard.watch import GuardCost

_INTERVAL_S = 0.25


def make_backend(name: str, model: Path, max_batch: int, thresholds: RepeatTerminateConfig) -> Any:
    """Not started; `vllm` or our own loop."""
    settings = ModelConfig(path=str(model), dtype="float32")
    if name == "hf":
        return HfBackend(settings, max_batch=max_batch, repeat_terminate=thresholds)
    import torch

    from sluice.workers.engine.vllm import VllmBackend

    options = VllmEngineOptions(enforce_eager=not torch.cuda.is_available())  # compiling outlasts the run on a CPU
    return VllmBackend(settings, max_batch=max_batch, options=options, repeat_terminate=thresholds)


async def decode(backend: Any, work: Work) -> Done:
    """All of it."""
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


async def _serve(backend: Any, answers: IO[bytes]) -> None:
    def answer(what: Any) -> None:
        answers.write(msgspec.json.encode(what) + b"\n")
        answers.flush()

    await backend.start()
    answer({})
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer(await decode(backend, msgspec.json.decode(line, type=Work)))
    await backend.close()


if __name__ == "__main__":
    import torch

    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _name, _model, _threads, _max_batch, _thresholds = sys.argv[1:]
    torch.set_num_threads(int(_threads))
    _config = msgspec.json.decode(_thresholds, type=RepeatTerminateConfig)
    asyncio.run(_serve(make_backend(_name, Path(_model), int(_max_batch), _config), _answers))
