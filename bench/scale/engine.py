"""A decode worker whose engine only answers: `python -m sluice.bench.scale.engine SET…`, until SIGTERM."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sluice.consumers.tasks.codec import HFTextCodec
from sluice.pipeline.config import load_config
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import EngineError
from sluice.pipeline.run.role import default_name, role_process
from sluice.workers.decode_worker import DecodeWorker
from sluice.workers.engine.contracts import EngineFacts, GuardTrial, SequenceOutput, SequenceRequest, WeightsProbe
from sluice.workers.job_prompts import JobPrompts

ANSWER = "7"


class AnsweringBackend:
    """The same tokens for every prompt, at once."""

    version = 0

    def __init__(self, model: Path) -> None:
        codec = HFTextCodec(model)
        self._token_ids = [*codec.encode(ANSWER), codec.eos_token_ids[0]]
        self.facts = EngineFacts(
            name="hf", engine_version="answers", device="cpu", dtype="float32", model=str(model),
            vocab_size=1 << 20, eos_token_ids=tuple(codec.eos_token_ids), context_length=1 << 16,
        )  # fmt: skip

    async def start(self) -> None:
        """There is nothing to load."""

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """The answer."""
        count = len(self._token_ids)
        return SequenceOutput(
            seq_key=request.seq_key, prompt_token_ids=request.prompt_token_ids, token_ids=list(self._token_ids),
            logprobs=[-0.5] * count, versions=[0] * count, text=ANSWER, raw_text=ANSWER, finish_reason="stop",
        )  # fmt: skip

    def abort(self, seq_key: str) -> None:
        """Nothing runs."""

    async def load_weights(self, directory: Path, version: int, probe: WeightsProbe | None = None) -> None:
        """Nobody publishes any."""
        raise EngineError(f"an engine without weights was given {directory}")

    async def score(self, token_ids: Sequence[int]) -> float:
        """Nobody asks."""
        raise EngineError("an engine without weights cannot score")

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        """There is none."""
        raise EngineError("an engine without a guard")

    async def close(self) -> None:
        """Nothing is left."""

    def progress(self) -> float:
        """It never hangs."""
        return time.monotonic()


async def serve(config: Config) -> None:
    """Until SIGTERM."""
    async with role_process(config, "worker", default_name("worker")) as role:
        prompts = JobPrompts(config.model, config.images)
        try:
            await DecodeWorker(role, AnsweringBackend(Path(config.model.path)), prompts).run()
        finally:
            await prompts.close()


if __name__ == "__main__":
    asyncio.run(serve(load_config(None, sys.argv[1:])))
