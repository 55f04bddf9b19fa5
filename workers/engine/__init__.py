"""Prompts in, tokens with logprobs out. It decodes; it doesn't parse, schedule or own processes.

```
 queue worker ─ SequenceRequest ─▶ Backend (contracts) ◀─ GenerationEngine ─ offline batches, `sluice generate`
                                     │  backends: by name, with a fallback
              hf: DecodeThread ─ Decoder ─ DecodeCache        vllm: AsyncLLM, its core in another process
                                     └────── RunningSequence ──────┘
```
- Before decoding: `prompts` (messages to ids), `preprocess` (images), `contracts` (what an engine can decode whole).
- While decoding: `running` (one sequence and its stop policy), `sampling`, `plugins`.
- On disk: `weight_files` and `workers/model_files`. Before serving: `backends` proves the guard.
- Entry points without a queue: `generation_engine` and its `requests`, `local`.

The names below belong to the offline engine; they are imported on first use, because torch is slow to load.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.pipeline.config.types import VllmEngineOptions, VlmPreprocessOptions, WorkerConfig
    from sluice.workers.engine.generation_engine import GenerationEngine
    from sluice.workers.engine.plugins import GenerationPlugin
    from sluice.workers.engine.requests import (
        GenerationOptions,
        GenerationResult,
        ModelLoadConfig,
        TextGenerationRequest,
        VlmGenerationRequest,
    )

_HOMES = {
    "GenerationEngine": "sluice.workers.engine.generation_engine",
    "GenerationOptions": "sluice.workers.engine.requests",
    "GenerationPlugin": "sluice.workers.engine.plugins",
    "GenerationResult": "sluice.workers.engine.requests",
    "ModelLoadConfig": "sluice.workers.engine.requests",
    "TextGenerationRequest": "sluice.workers.engine.requests",
    "VllmEngineOptions": "sluice.pipeline.config.types",
    "VlmGenerationRequest": "sluice.workers.engine.requests",
    "VlmPreprocessOptions": "sluice.pipeline.config.types",
}

__all__ = [
    "GenerationEngine",
    "GenerationOptions",
    "GenerationPlugin",
    "GenerationResult",
    "ModelLoadConfig",
    "TextGenerationRequest",
    "VllmEngineOptions",
    "VlmGenerationRequest",
    "VlmPreprocessOptions",
]


async def import_engines(worker: WorkerConfig) -> None:
    """Those of this configuration, in a thread; no other is imported."""
    from sluice.pipeline.run.imports import import_slow

    names = (worker.backend, worker.fallback_backend)
    await asyncio.to_thread(import_slow, *(f"{__name__}.{name}" for name in names if name))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
