"""Backends by name. What the configuration says is what runs; nothing changes silently."""

from __future__ import annotations

import torch

from pipeline.config.types import ModelConfig, RepeatTerminateConfig, WorkerConfig
from workers.generation.backends.hf import HfBackend
from workers.generation.backends.routed import RoutedBackend
from workers.generation.contracts import Backend

BACKENDS = ("hf", "vllm")


def make_backend(
    model: ModelConfig, worker: WorkerConfig, repeat_terminate: RepeatTerminateConfig | None = None
) -> RoutedBackend:
    """The configured backend with its fallback, not started; both with the repeat guard if it is enabled."""
    if worker.torch_threads:
        torch.set_num_threads(worker.torch_threads)

    def hf() -> Backend:
        return HfBackend(
            model,
            max_batch=worker.max_batch,
            repeat_terminate=repeat_terminate,
            processed_logprobs=worker.logprobs_mode == "processed",
        )

    if worker.backend == "hf":
        return RoutedBackend(hf(), None, repeat_terminate)
    from workers.generation.backends.vllm import VllmBackend

    vllm = VllmBackend(model, max_batch=worker.max_batch, options=worker.vllm, repeat_terminate=repeat_terminate)
    return RoutedBackend(vllm, hf if worker.fallback_backend == "hf" else None, repeat_terminate)
