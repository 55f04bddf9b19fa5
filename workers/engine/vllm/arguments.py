"""Maps our options to vLLM's engine arguments, checked by name before vLLM sees them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, get_args

from sluice.pipeline.config.suggest import nearest
from sluice.pipeline.config.types import ModelConfig, VllmEngineOptions
from sluice.pipeline.errors import ConfigError, ModelError
from sluice.workers.engine.adapters import AdapterRoom
from sluice.workers.engine.vllm.processor import Reshaper, SeededSampler
from sluice.workers.engine.vllm.vision import Vision
from sluice.workers.engine.vllm.worker_extension import WEIGHT_TRANSFER, WorkerExtension
from sluice.workers.guard.requests import ADDITIONAL
from sluice.workers.guard.rules import GuardRules
from sluice.workers.guard.vllm import WorkerRepeatTerminate

_OPTIONS = frozenset(VllmEngineOptions.__struct_fields__) - {"extra", "kv_cache_gb"}
_GIB = 1 << 30


def engine_arguments(
    model: ModelConfig,
    options: VllmEngineOptions,
    max_batch: int,
    log_config: Path,
    vision: Vision | None = None,
    guard: GuardRules | None = None,
    lora: dict[str, Any] | None = None,
) -> Any:
    """`AsyncEngineArgs`; `lora` are those of `lora_arguments`.

    Raises ConfigError for an unknown or reserved option, ModelError for a missing device.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
        raise ConfigError("VLLM_USE_V2_MODEL_RUNNER=1: this backend samples through the V1 model runner; unset it")
    ours: dict[str, Any] = {
        "model": model.path,
        "trust_remote_code": model.trust_remote_code,
        "dtype": _dtype(model.dtype, current_platform.is_cpu()),
        "max_num_seqs": max_batch,
        "logprobs_mode": "raw_logprobs",
        "logits_processors": [
            _name(SeededSampler),
            _name(Reshaper),
            *([_name(WorkerRepeatTerminate)] if guard else []),
        ],
        "worker_extension_cls": _name(WorkerExtension, "."),
        "weight_transfer_config": WeightTransferConfig(backend=WEIGHT_TRANSFER),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "logging_config": LoggingConfig(configure_logging=True, pylogging_config_file=str(log_config)),
        **_device(model, current_platform.is_cpu()),
        **{name: getattr(options, name) for name in _OPTIONS},
        **(vision.arguments if vision is not None else {}),
        **(lora or {}),
    }
    if current_platform.is_cpu():
        ours["kv_cache_memory_bytes"] = _kv_cache_bytes(options)
    if guard is not None:
        ours["additional_config"] = {ADDITIONAL: guard.plain()}
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in options.extra:
        if name in ours:
            raise ConfigError(f"worker.vllm.extra.{name}: this backend sets it; use its own option")
        if name not in known:
            raise ConfigError(f"worker.vllm.extra.{name}: vLLM has no such engine argument{_meant(name, known)}")
    return AsyncEngineArgs(**ours, **options.extra)


def lora_arguments(room: AdapterRoom, layers: list[str]) -> dict[str, Any]:
    """For adapters on layers of these names. Raises ConfigError for a rank that vLLM doesn't have.

    The output layer isn't among them: with an adapter there, vLLM can't return logprobs of prompts.
    """
    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    if (rank := next((rank for rank in ranks if rank >= room.rank), None)) is None:
        raise ConfigError(f"an adapter of rank {room.rank}: vLLM has no more than {ranks[-1]}; use worker.backend hf")
    # One more for a new version beside the old one, and one that stays empty: on CPUs, sequences without an adapter
    # get what is in the last one (vllm#48421).
    count = room.count + 2
    return {
        "enable_lora": True,
        "max_loras": count,
        "max_cpu_loras": count,
        "max_lora_rank": rank,
        "lora_target_modules": layers,
    }


def _meant(name: str, known: list[str]) -> str:
    found = nearest(name, [argument for argument in known if not argument.startswith("_")])
    return f"; did you mean {found!r}?" if found else "; its documentation lists them (EngineArgs)"


def _name(kind: type, separator: str = ":") -> str:
    return f"{kind.__module__}{separator}{kind.__qualname__}"


def _dtype(name: str, on_cpu: bool) -> str:
    if name == "auto":
        return "float32" if on_cpu else "bfloat16"
    return name


def _device(model: ModelConfig, on_cpu: bool) -> dict[str, Any]:
    """Engine arguments that choose the device. Raises ModelError if this vLLM has no such device."""
    kind, _, index = model.device.partition(":")
    if kind == "auto" or (kind == "cpu" and on_cpu):
        return {}
    if kind == "cuda" and not on_cpu and (not index or index.isdigit()):
        return {"device_ids": [int(index)]} if index else {}
    build = "the CPU" if on_cpu else "GPUs"
    raise ModelError(f"model.device is {model.device!r}, but this vLLM is built for {build}; use auto")


def _kv_cache_bytes(options: VllmEngineOptions) -> int | None:
    if options.kv_cache_gb is not None:
        return int(options.kv_cache_gb * _GIB)
    return None if os.environ.get("VLLM_CPU_KVCACHE_SPACE") else _GIB
