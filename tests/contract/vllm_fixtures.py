"""A running vLLM engine for the tests; real vLLM on the CPU, its core in a process of its own.

A start takes seconds, so the tests share one engine (`vllm`); those that break theirs start their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import ModelConfig, VllmEngineOptions
from sluice.workers.engine.adapters import AdapterRoom
from sluice.workers.engine.vllm import VllmBackend

KV_CACHE_GB = 0.0008


def vllm_options(**options: Any) -> VllmEngineOptions:
    """Without compilation, which takes half a minute; with room for few tokens and short steps, so that prefills come
    in pieces and running sequences are preempted.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("vllm is not installed; run `make setup`, which installs the CPU build")
    options = {"enforce_eager": True, "kv_cache_gb": KV_CACHE_GB, "extra": {"max_num_batched_tokens": 48}, **options}
    return VllmEngineOptions(**options)


def vlm_options(**extra: Any) -> VllmEngineOptions:
    """The same for a vision-language model; transformers' implementation needs no torchvision."""
    return vllm_options(extra={"max_num_batched_tokens": 48, "model_impl": "transformers", **extra})


def make_vllm(
    directory: Path,
    *,
    max_batch: int = 6,
    room: AdapterRoom | None = None,
    max_pause_s: float | None = None,
    dtype: Any = "auto",
    **options: Any,
) -> VllmBackend:
    """A backend that is not started."""
    config, given = ModelConfig(path=str(directory), dtype=dtype), vllm_options(**options)
    return VllmBackend(config, max_batch=max_batch, options=given, room=room, max_pause_s=max_pause_s)


@contextlib.contextmanager
def started_vllm(directory: Path, **options: Any) -> Iterator[VllmBackend]:
    """A started vLLM backend; calls may come from any event loop."""
    backend = make_vllm(directory, **options)
    asyncio.run(backend.start())
    try:
        yield backend
    finally:
        asyncio.run(backend.close())


def cores() -> set[Any]:
    """The core processes that this process has."""
    return {child for child in multiprocessing.active_children() if child.name == "EngineCore"}


@pytest.fixture(scope="session")
def vllm(model_dir: Path) -> Iterator[VllmBackend]:
    with started_vllm(model_dir) as running:
        yield running
