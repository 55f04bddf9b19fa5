"""The vLLM worker's processed prompts are bounded by all that they keep in memory."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sluice.workers.engine.contracts import SequenceRequest
from sluice.workers.engine.vllm.vision import ProcessedPrompts

TENSOR = np.zeros((3, 8, 8), dtype=np.float32)


def picture(sha256: str = "") -> Image.Image:
    image = Image.new("RGB", (16, 16))
    if sha256:
        image.info["sha256"] = sha256
    return image


def image_in_memory(prompts: ProcessedPrompts, data: Any, digests: list[str]) -> list[bool]:
    """Ask for one prompt per digest: which of their images stay in memory."""
    seen: list[weakref.ref[Any]] = []

    async def process() -> Any:
        return {"mm_kwargs": {"image": [None, {"pixel_values": SimpleNamespace(data=data)}]}}

    async def ask(digest: str) -> None:
        image = picture(digest)
        seen.append(weakref.ref(image))
        await prompts.of(SequenceRequest("s", (1,), images=(image,)), process)

    async def ask_all() -> None:
        for digest in digests:
            await ask(digest)

    asyncio.run(ask_all())
    return [ref() is not None for ref in seen]


def test_images_with_a_digest_are_not_kept() -> None:
    prompts = ProcessedPrompts()
    assert image_in_memory(prompts, TENSOR, ["a", "b", "a"]) == [False, False, False]
    assert prompts.processed == 2


def test_images_without_a_digest_are_kept_and_counted() -> None:
    assert image_in_memory(ProcessedPrompts(), TENSOR, ["", "", ""]) == [True, True, True]
    two = ProcessedPrompts(max_bytes=2 * (TENSOR.nbytes + 4 * 16 * 16))
    assert image_in_memory(two, TENSOR, ["", "", ""]) == [False, True, True]


@pytest.mark.parametrize("data", [TENSOR, [TENSOR], [[TENSOR], []]], ids=["tensor", "list", "nested"])
def test_tensors_in_lists_are_counted(data: Any) -> None:
    prompts = ProcessedPrompts(max_bytes=2 * TENSOR.nbytes)
    image_in_memory(prompts, data, ["a", "b", "c", "c", "b"])
    assert prompts.processed == 3
    image_in_memory(prompts, data, ["a"])
    assert prompts.processed == 4
