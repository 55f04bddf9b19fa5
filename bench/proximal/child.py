"""One engine in a process of its own: `python -m sluice.bench.proximal.child BACKEND MODEL VARIANTS MAX_BATCH`.

- It loads its engine and answers Ready; then each line on stdin is a Work, answered with its fields, one line each.
  While it serves a queue it says what it saw, until the next line, which it answers with `{}`.
- Answers go to the stdout it was started with; whatever libraries print goes to its log.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec

from sluice.bench.proximal.score_cost import score_cost
from sluice.bench.proximal.served import serve
from sluice.bench.proximal.throughput import throughput
from sluice.bench.proximal.valid_share import valid_share
from sluice.bench.proximal.versions import Variants
from sluice.bench.proximal.work import CostWork, Failed, Ready, ServeWork, ShareWork, ThroughputWork, Work
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import ModelConfig, VllmEngineOptions, WorkerConfig
from sluice.pipeline.errors import first_cause
from sluice.workers.engine.backends import make_backend
from sluice.workers.engine.contracts import Backend

THREADS = 1


def backend_of(name: str, model: Path, max_batch: int) -> Backend:
    """Not started; `vllm` or our own loop, as a worker makes it."""
    import torch

    options = VllmEngineOptions(enforce_eager=not torch.cuda.is_available())  # compiling outlasts the run on a CPU
    worker = WorkerConfig(
        backend="vllm" if name == "vllm" else "hf", max_batch=max_batch, torch_threads=THREADS, vllm=options
    )
    return make_backend(ModelConfig(path=str(model), dtype="float32"), worker)


async def _do(backend: Backend, variants: Variants, work: Work, tell: Callable[[Any], None]) -> Any:
    match work:
        case CostWork(sizes):
            return await score_cost(backend, variants, sizes)
        case ThroughputWork(sizes, home):
            return await throughput(backend, variants, sizes, Path(home))
        case ShareWork(sizes, settings):
            return await valid_share(backend, variants, sizes, load_config(None, settings))
        case ServeWork(settings):
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(serve(backend, load_config(None, settings), tell, stop))
                await asyncio.to_thread(sys.stdin.readline)
                stop.set()
                await serving
            return {}


async def _serve(name: str, model: Path, variants: Variants, max_batch: int, answers: IO[bytes]) -> None:
    def tell(what: Any) -> None:
        answers.write(msgspec.json.encode(what) + b"\n")
        answers.flush()

    backend = backend_of(name, model, max_batch)
    await backend.start()
    tell(Ready(backend.version))
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                tell(await _do(backend, variants, msgspec.json.decode(line, type=Work), tell))
            except Exception as error:
                cause = first_cause(error)
                tell(Failed(f"{type(cause).__name__}: {cause}"))
                raise
    finally:
        await backend.close()


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _name, _model, _variants, _max_batch = sys.argv[1:]
    asyncio.run(_serve(_name, Path(_model), Variants.read(Path(_variants)), int(_max_batch), _answers))
