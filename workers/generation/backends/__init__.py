"""The engines, one sub-package each; none is imported before it is asked for."""

from __future__ import annotations

from pipeline.config.types import ModelConfig, WorkerConfig
from pipeline.errors import ConfigError
from workers.generation.contracts import Backend


def make_backend(model: ModelConfig, worker: WorkerConfig) -> Backend:
    """The backend that the configuration names, not yet started. Raises ConfigError."""
    if worker.backend == "hf":
        import torch

        from workers.generation.backends.hf import HfBackend

        torch.set_num_threads(worker.torch_threads)
        return HfBackend(model, max_batch=worker.max_batch)
    raise ConfigError(f"worker.backend {worker.backend!r} is unknown; use hf")
