"""What the engine contract tests share: a started backend, short requests, and the plain reference model."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.wire.messages import Progress, SamplingParams
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from tests.deadlines import HANG_S

ATTEMPTS = 5
_Found = TypeVar("_Found")


@contextlib.contextmanager
def started(directory: Path, **options: Any) -> Iterator[HfBackend]:
    """A started HF backend on the CPU."""
    backend = HfBackend(ModelConfig(path=str(directory), device="cpu"), **options)
    asyncio.run(backend.start())
    try:
        yield backend
    finally:
        asyncio.run(backend.close())


def request(prompt: Sequence[int], seed: int = 0, **sampling: Any) -> SequenceRequest:
    """Greedy for 24 tokens unless told otherwise."""
    options = {"temperature": 0.0, "max_new_tokens": 24, **sampling}
    return SequenceRequest("s", tuple(prompt), SamplingParams(**options), seed)


def at_first_report(act: Callable[[], object]) -> Callable[[Progress], None]:
    """A report that holds the engine, at the first one of all, until the caller's event loop has done this."""
    loop, is_done = asyncio.get_running_loop(), threading.Event()

    async def acted() -> None:
        act()
        await asyncio.sleep(0)  # what it told tasks is in the engine's hands then

    def report(_: Progress) -> None:
        if not is_done.is_set():
            is_done.set()
            asyncio.run_coroutine_threadsafe(acted(), loop).result(HANG_S)

    return report


async def repeated(attempt: Callable[[], Awaitable[_Found]], until: Callable[[_Found], bool]) -> _Found:
    """The first that was in time, or the last: vLLM's core may be far ahead when we are late."""
    for _ in range(ATTEMPTS - 1):
        found = await attempt()
        if until(found):
            return found
    return await attempt()


async def decode_aborted(backend: Backend, asked: SequenceRequest) -> SequenceOutput:
    """Aborted at its first report. Once more where it had ended."""

    async def attempt() -> SequenceOutput:
        report = at_first_report(lambda: backend.abort(asked.seq_key))
        return await asyncio.wait_for(backend.decode(replace(asked, report_every=4, report=report)), HANG_S)

    return await repeated(attempt, until=lambda output: len(output.token_ids) < asked.sampling.max_new_tokens)


async def decode_all(backend: Backend, requests: Sequence[SequenceRequest]) -> list[SequenceOutput]:
    """All requests at once."""
    return await asyncio.gather(*(backend.decode(one) for one in requests))


def run(backend: Backend, *requests: SequenceRequest) -> list[SequenceOutput]:
    """All requests at once, from a fresh event loop."""
    return asyncio.run(decode_all(backend, requests))


def ragged_prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Random byte tokens, 1..longest a prompt."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def reference(directory: Path) -> Any:
    """The same model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def reference_logprobs(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Logprob of each token by one plain forward pass, shape (len(tokens),)."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
