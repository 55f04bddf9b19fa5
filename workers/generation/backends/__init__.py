"""Backends by name. What the config says is what runs; nothing changes silently."""

from __future__ import annotations

import torch

from pipeline.config.types import ModelConfig, WorkerConfig
from workers.generation.backends.hf import HfBackend
from workers.generation.contracts import Backend


def make_backend(model: ModelConfig, worker: WorkerConfig) -> Backend:
    """The configured backend, not started."""
    torch.set_num_threads(worker.torch_threads)
    return HfBackend(model, max_batch=worker.max_batch)
