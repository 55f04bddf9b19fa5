"""What the engine contract tests share: a started backend, short requests, and the plain reference model."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest
from sluice.workers.engine.hf import HfBackend


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
