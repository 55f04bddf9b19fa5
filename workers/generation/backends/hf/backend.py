"""The asynchronous face of the Hugging Face engine; implements `contracts.Backend`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.config.types import ModelConfig, RepeatTerminateConfig
from pipeline.errors import EngineError, RequestError
from workers.generation.backends.hf.images import PreparedImages
from workers.generation.backends.hf.model import load_model
from workers.generation.backends.hf.thread import DecodeThread
from workers.generation.contracts import EngineFacts, GuardTrial, SequenceOutput, SequenceRequest, WeightsProbe
from workers.guard.watch import GuardCost


class HfBackend:
    """One model in one thread, decoding up to `max_batch` sequences at a time.

    Calls may come from any event loop. `version` is that of the weights in `config.path`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_batch: int = 32,
        version: int = 0,
        repeat_terminate: RepeatTerminateConfig | None = None,
        processed_logprobs: bool = False,
    ) -> None:
        """`processed_logprobs`: at each sequence's own temperature."""
        if max_batch < 1:
            raise EngineError(f"max_batch must be >= 1, got {max_batch}")
        load = partial(
            load_model, config, repeat_terminate or RepeatTerminateConfig(), processed_logprobs=processed_logprobs
        )
        self._thread = DecodeThread(load, Path(config.path), max_batch, version)
        self._facts: EngineFacts | None = None
        self._images: PreparedImages | None = None
        self._started = False

    @property
    def facts(self) -> EngineFacts:
        """What the engine is. Raises EngineError before `start` has ended."""
        if self._facts is None:
            raise EngineError("the hf engine is not started; await start() first")
        return self._facts

    @property
    def version(self) -> int:
        """Weight version that is loaded now."""
        return self._thread.version

    async def start(self) -> None:
        """Load the model. Raises ModelError; EngineError if it was started before."""
        if self._started:
            raise EngineError("the hf engine was started before; make a new backend")
        self._started = True
        self._thread.start()
        facts = await asyncio.wrap_future(self._thread.ready)
        if self._thread.processor is not None:
            self._images = PreparedImages(self._thread.processor)
        self._facts = facts

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """Decode one sequence beside the others. Raises RequestError or EngineError."""
        thread = self._running()
        if request.image is None:
            return await asyncio.wrap_future(thread.decode(request))
        if self._images is None:
            raise RequestError(
                f"{request.seq_key}: the model {self.facts.model} takes no images; send text alone, or use a "
                "vision-language model (model.variant auto or vlm)"
            )
        async with self._images.of(request) as prepared:
            future = thread.decode(request, prepared.inputs)
            if prepared.aborted:
                thread.abort(request.seq_key)
            return await asyncio.wrap_future(future)

    def abort(self, seq_key: str) -> None:
        """End the sequences of this key; their `decode` returns what they have."""
        thread = self._running()
        if self._images is not None:
            self._images.abort(seq_key)
        thread.abort(seq_key)

    async def load_weights(self, directory: Path, version: int, probe: WeightsProbe | None = None) -> None:
        """Swap the weights after the current step; see `contracts.Backend`. Raises WeightsError or TornWeights."""
        await asyncio.wrap_future(self._running().load(Path(directory), version, probe))

    async def score(self, token_ids: Sequence[int]) -> float:
        """Summed fp32 logprob (nats) of tokens 1.. . Raises EngineError."""
        return await asyncio.wrap_future(self._running().score(token_ids))

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        """Show the tokens to a fresh guard. Raises EngineError if none is loaded."""
        rules = self._running().guard
        if rules is None:
            raise EngineError("the hf engine has no repeat guard; set repeat_terminate.enabled")
        return GuardTrial(rules, rules.guard().push_all(token_ids))

    async def guard_cost(self) -> GuardCost:
        """Of all steps since the last call."""
        return self._running().guard_cost.taken()

    async def close(self) -> None:
        """End the thread; running sequences get an EngineError."""
        if self._images is not None:
            self._images.close()
        if self._started:
            await asyncio.to_thread(self._thread.stop)

    def progress(self) -> float:
        """Monotonic seconds of the last step, or of now while idle."""
        return self._thread.progress() if self._started else time.monotonic()

    def _running(self) -> DecodeThread:
        if self._facts is None:
            raise EngineError("the hf engine is not started; await start() first")
        return self._thread
