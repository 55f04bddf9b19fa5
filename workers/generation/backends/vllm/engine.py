"""One vLLM engine on the loop it belongs to: start, serve, end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.types import ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from pipeline.errors import EngineError
from workers.generation.backends.vllm.logs import EngineLog
from workers.generation.backends.vllm.sequences import Sequences
from workers.generation.backends.vllm.starting import StartedEngine, start_engine
from workers.generation.backends.vllm.swap import CoreWeights
from workers.generation.contracts import EngineFacts, GuardTrial, SequenceOutput, SequenceRequest, WeightsProbe
from workers.guard.watch import GuardCost

_CORE_STOP_S = 5.0
_Result = TypeVar("_Result")


class Engine:
    """Its coroutines run on one loop; `facts`, `version`, `started` and `progress` may be read from any thread."""

    def __init__(
        self,
        model: ModelConfig,
        options: VllmEngineOptions,
        max_batch: int,
        version: int,
        repeat_terminate: RepeatTerminateConfig,
    ) -> None:
        self._settings = (model, options, max_batch, repeat_terminate)
        self._log: EngineLog | None = None
        self._version = version
        self._engine: StartedEngine | None = None
        self._sequences: Sequences | None = None
        self._weights: CoreWeights | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    @property
    def started(self) -> bool:
        """Whether `start` has ended well."""
        return self._sequences is not None

    @property
    def facts(self) -> EngineFacts:
        """Raises EngineError before `start` has ended."""
        if self._engine is None:
            raise EngineError("the vllm engine is not started; await start() first")
        return self._engine.facts

    @property
    def version(self) -> int:
        """Weight version that is loaded now."""
        return self._version

    async def start(self) -> None:
        """Blocks this loop until the model is there. Raises ModelError, ConfigError or EngineError."""
        self._log = EngineLog()
        self._engine = start_engine(*self._settings, self._log)
        sequences = Sequences(self._engine, self._version, self._why_dead)
        # vLLM asks its core once; from then on requests are sent without a wait.
        await sequences.or_dead(self._engine.llm.get_supported_tasks())
        self._weights = CoreWeights(self._engine, Path(self._settings[0].path), sequences)
        self._sequences = sequences

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """See `contracts.Backend`."""
        return await self._tracked(self._running().decode(request))

    async def abort(self, seq_key: str) -> None:
        """See `contracts.Backend`."""
        await self._running().abort(seq_key)

    async def score(self, token_ids: Sequence[int]) -> float:
        """See `contracts.Backend`."""
        return await self._tracked(self._running().score(token_ids))

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        """See `contracts.Backend`."""
        return await self._tracked(self._running().guard.attempt(token_ids))

    async def guard_cost(self) -> GuardCost:
        """Of all steps since the last call."""
        return await self._tracked(self._running().guard.cost())

    async def load_weights(self, directory: Path, version: int, probe: WeightsProbe | None) -> None:
        """See `contracts.Backend`."""
        await self._tracked(self._load(directory, version, probe))

    async def close(self) -> None:
        """End the core; whoever waits gets an EngineError."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._engine is not None:
            self._engine.llm.shutdown(timeout=_CORE_STOP_S)
        if self._log is not None:
            self._log.close()

    def progress(self) -> float:
        """Monotonic seconds of the last output, or of now while idle or starting."""
        return time.monotonic() if self._sequences is None else self._sequences.progress()

    async def _load(self, directory: Path, version: int, probe: WeightsProbe | None) -> None:
        assert self._weights is not None
        names = await self._weights.checked(directory)
        sequences = self._running()
        async with sequences.paused():
            await self._weights.load(directory, names, probe)
            self._version = sequences.version = version

    async def _tracked(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run it so that `close` can end it with an EngineError; its caller ends it by cancelling.

        No task of its own: an abort that comes right behind must find the sequence.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._closing:
                raise EngineError("the vllm engine is closed") from None
            raise
        finally:
            self._tasks.discard(task)

    def _why_dead(self) -> str:
        """Why the core is gone, as far as anyone can tell."""
        if self._closing:
            return "the vllm engine is closed"
        assert self._engine is not None
        assert self._log is not None
        manager = self._engine.llm.engine_core.resources.engine_manager
        codes = [process.exitcode for process in manager.processes if process.exitcode]
        ended = [f"signal {-code}" if code < 0 else f"exit code {code}" for code in codes]
        cause = self._log.last_cause() or "no reason given"
        return f"the vllm engine core died ({', '.join(ended) or 'no exit code'}): {cause}"

    def _running(self) -> Sequences:
        if self._sequences is None:
            raise EngineError("the vllm engine is not started; await start() first")
        return self._sequences
