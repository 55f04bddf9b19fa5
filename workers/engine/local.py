"""One loaded model in this process, one sequence per call; the entry point `sluice.engines: local`.

For inspecting a model without a queue. Tokens are the same that a worker samples from the same prompt, sampling and
seed.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from sluice.pipeline.config.types import ModelConfig, WorkerConfig
from sluice.pipeline.wire.messages import SamplingParams, SequenceResult
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers.engine.backends import make_backend
from sluice.workers.engine.contracts import Backend, SequenceRequest


class LocalEngine:
    """A started backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def decode(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> SequenceResult:
        """Decodes up to the context length. Raises RequestError if the prompt leaves no room, EngineError."""
        facts = self._backend.facts
        room = max(1, facts.context_length - len(prompt_token_ids))
        sampling = msgspec.structs.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        key = secrets.token_hex(8)
        output = await self._backend.decode(
            SequenceRequest(seq_key=key, prompt_token_ids=tuple(prompt_token_ids), sampling=sampling, seed=seed)
        )
        return SequenceResult(
            seq_id=key,
            group_id=key,
            group_size=1,
            index=0,
            backend=facts.name,
            engine_version=facts.engine_version,
            prompt_token_ids=TokenArray(output.prompt_token_ids),
            **output.sampled.columns(),
            text=output.text,
            raw_text=output.raw_text,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            sampling=sampling,
        )


@asynccontextmanager
async def open_engine(model: ModelConfig, worker: WorkerConfig) -> AsyncIterator[LocalEngine]:
    """The model on the configured backend, for the duration of the block. Raises ModelError, EngineError."""
    backend = make_backend(model, worker)
    try:
        await backend.start()
        yield LocalEngine(backend)
    finally:
        await backend.close()
