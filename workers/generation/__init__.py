"""Prompts in, tokens with logprobs out; it decodes, and never parses, schedules or owns processes.

```
 queue worker ─ SequenceRequest ─▶ Backend (contracts) ◀─ GenerationEngine ─ offline batches, `sluice generate`
                                     │
        backends/hf: DecodeThread ─ Decoder ─ DecodeCache, sampler        backends/vllm: AsyncLLM
                                     └───────── RunningSequence ─────────────┘
 prompts, chat_template: messages ─▶ prompt ids      stop_policy: when it ends, what its text is      plugins
```
The names below are the offline engine's; they are imported when they are first asked for (torch is slow to load).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.generation.engine import GenerationEngine
    from workers.generation.options import (
        GenerationOptions,
        ModelLoadConfig,
        VllmEngineOptions,
        VlmPreprocessOptions,
    )
    from workers.generation.plugins import GenerationPlugin
    from workers.generation.requests import GenerationResult, TextGenerationRequest, VlmGenerationRequest

_HOMES = {
    "GenerationEngine": "engine",
    "GenerationOptions": "options",
    "GenerationPlugin": "plugins",
    "GenerationResult": "requests",
    "ModelLoadConfig": "options",
    "TextGenerationRequest": "requests",
    "VllmEngineOptions": "options",
    "VlmGenerationRequest": "requests",
    "VlmPreprocessOptions": "options",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
