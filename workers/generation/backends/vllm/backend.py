"""The asynchronous face of the vLLM engine; implements `contracts.Backend`."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.types import ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from pipeline.errors import ConfigError, EngineError
from workers.generation.backends.vllm.engine import Engine
from workers.generation.backends.vllm.loop_thread import LoopThread
from workers.generation.contracts import EngineFacts, GuardTrial, SequenceOutput, SequenceRequest, WeightsProbe
from workers.guard.watch import GuardCost

_STOP_S = 15.0
_Result = TypeVar("_Result")


class VllmBackend:
    """One vLLM engine, decoding up to `max_batch` sequences at a time.

    Calls may come from any event loop. `version` is that of the weights in `model.path`.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        max_batch: int = 32,
        options: VllmEngineOptions | None = None,
        version: int = 0,
        repeat_terminate: RepeatTerminateConfig | None = None,
    ) -> None:
        if max_batch < 1:
            raise EngineError(f"max_batch must be >= 1, got {max_batch}")
        guard = repeat_terminate or RepeatTerminateConfig()
        self._engine = Engine(model, options or VllmEngineOptions(), max_batch, version, guard)
        self._thread: LoopThread | None = None
        self._closed = False

    @property
    def facts(self) -> EngineFacts:
        """What the engine is. Raises EngineError before `start` has ended."""
        return self._engine.facts

    @property
    def version(self) -> int:
        """Weight version that is loaded now."""
        return self._engine.version

    async def start(self) -> None:
        """Load the model. Raises ModelError, ConfigError or EngineError; EngineError if it was started before."""
        if self._thread is not None or self._closed:
            raise EngineError("the vllm engine was started before; make a new backend")
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("worker.backend is vllm, and vLLM is not installed: `make setup`, or the extra `vllm`")
        self._thread = LoopThread("sluice-vllm")
        try:
            await asyncio.wrap_future(self._thread.submit(self._engine.start()))
        except BaseException:
            await self.close()
            raise

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """Decode one sequence beside the others. Raises RequestError or EngineError."""
        return await self._do(self._engine.decode(request))

    def abort(self, seq_key: str) -> None:
        """End the sequences of this key; their `decode` returns what they have."""
        self._running().submit(self._engine.abort(seq_key))

    async def load_weights(self, directory: Path, version: int, probe: WeightsProbe | None = None) -> None:
        """Swap the weights between two tokens; see `contracts.Backend`. Raises WeightsError or TornWeights."""
        await self._do(self._engine.load_weights(Path(directory), version, probe))

    async def score(self, token_ids: Sequence[int]) -> float:
        """Summed fp32 logprob (nats) of tokens 1.. . Raises EngineError."""
        return await self._do(self._engine.score(token_ids))

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        """Show the tokens to a fresh guard in the core. Raises EngineError if none is loaded."""
        return await self._do(self._engine.try_guard(token_ids))

    async def guard_cost(self) -> GuardCost:
        """Of all steps of the core since the last call."""
        return await self._do(self._engine.guard_cost())

    async def close(self) -> None:
        """End the engine and its processes; running sequences get an EngineError."""
        if self._closed:
            return
        self._closed = True
        thread = self._thread
        if thread is not None:
            closing = asyncio.wrap_future(thread.submit(self._engine.close()))
            await asyncio.wait([closing], timeout=_STOP_S)
            await asyncio.to_thread(thread.stop, _STOP_S)
            if closing.done() and not closing.cancelled():
                closing.result()

    def progress(self) -> float:
        """Monotonic seconds of the last output, or of now while idle."""
        return self._engine.progress() if self._thread is not None else time.monotonic()

    async def _do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            thread = self._running()
        except EngineError:
            work.close()
            raise
        return await asyncio.wrap_future(thread.submit(work))

    def _running(self) -> LoopThread:
        if self._closed:
            raise EngineError("the vllm engine is closed")
        if self._thread is None or not self._engine.started:
            raise EngineError("the vllm engine is not started; await start() first")
        return self._thread
