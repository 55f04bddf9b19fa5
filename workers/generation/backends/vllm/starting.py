"""From a model directory to a running `AsyncLLM`; what goes wrong comes out as ModelError with its cause."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from pipeline.config.types import ModelConfig, RepeatTerminateConfig, VllmEngineOptions
from pipeline.errors import ConfigError, EngineError, ModelError
from pipeline.logs import get_logger
from workers.generation.backends.vllm.checkpoint import Checkpoint
from workers.generation.backends.vllm.environment import START_METHOD, engine_environment, prepare_cpu, start_methods
from workers.generation.backends.vllm.images import Vision
from workers.generation.backends.vllm.logs import EngineLog
from workers.generation.backends.vllm.start_watch import LIMIT_S, StartWatch
from workers.generation.contracts import EngineFacts
from workers.generation.model_files import check_directory, eos_token_ids
from workers.generation.tokenizer import load_tokenizer
from workers.guard.interface import check_interfaces
from workers.guard.rules import GuardRules, check_end


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A running engine and what it is."""

    llm: Any  # vllm.v1.engine.async_llm.AsyncLLM
    tokenizer: Any
    facts: EngineFacts
    checkpoint: Checkpoint
    vision: Vision | None = None  # None: takes no images
    guard: GuardRules | None = None  # None: loops run on


def start_engine(
    model: ModelConfig,
    options: VllmEngineOptions,
    max_batch: int,
    repeat_terminate: RepeatTerminateConfig,
    log: EngineLog,
    stall_s: float = LIMIT_S,
) -> StartedEngine:
    """Start vLLM from within the event loop that is to serve it; blocks for seconds to minutes.

    Raises ModelError, ConfigError, or EngineError if the core died without saying why, stood still for `stall_s`, or
    the guard cannot be loaded.
    """
    check_directory(model.path)
    if model.attn_implementation is not None:
        raise ConfigError("model.attn_implementation is for the hf backend; use worker.vllm.extra.attention_backend")
    vision = Vision.of(model, options)
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    checkpoint = Checkpoint(model)
    guard = GuardRules.of(repeat_terminate, tokenizer) if repeat_terminate.enabled else None
    chosen = os.environ.get(START_METHOD)
    with engine_environment(log.folder):
        from vllm.platforms import current_platform

        from workers.generation.backends.vllm.arguments import engine_arguments

        if current_platform.is_cpu():
            prepare_cpu(torch.get_num_threads())
        if guard is not None:
            check_interfaces()
        arguments = engine_arguments(model, options, max_batch, log.write_config(), vision, guard)
        try:
            config = arguments.create_engine_config()
        except (ValueError, OSError, RuntimeError, ImportError, KeyError, TypeError, NotImplementedError) as error:
            hint = vision.hint(options) if vision is not None else ""
            raise ModelError(
                f"{model.path}: vLLM cannot run this model with these options: {_plain(error, log)}{hint}"
            ) from error
        if guard is not None:
            check_end(model.path, eos_token_ids(_eos_sources(config.model_config, tokenizer)))
        llm = _start_core(model.path, config, start_methods(chosen), log, stall_s)
        vision = _taken(model, config, vision)
        facts = _facts(model, config, tokenizer, supports_vlm=vision is not None, guarded=guard is not None)
        return StartedEngine(llm, tokenizer, facts, checkpoint, vision, guard)


def _start_core(path: str, config: Any, methods: Sequence[str], log: EngineLog, stall_s: float) -> Any:
    """The `AsyncLLM`, by the first of the `methods` under which its core does not stand still while it starts."""
    from vllm.v1.engine.async_llm import AsyncLLM

    failed: Exception | None = None
    seen = ""
    for method in methods:
        os.environ[START_METHOD] = method
        with StartWatch(log.folder, stall_s) as watch:
            try:
                return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
            except (RuntimeError, ValueError, OSError, TimeoutError) as error:
                failed = error
        if watch.stalled is None:
            raise _start_error(path, failed, log) from failed
        seen = watch.stalled
        get_logger().warning("vLLM stood still at its start", model=path, start_method=method, seen=seen)
    raise EngineError(f"{path}: vLLM did not start: {seen}") from failed


def _taken(model: ModelConfig, config: Any, vision: Vision | None) -> Vision | None:
    """`vision` if vLLM takes images; where a model that sees is used for text alone, the log says why."""
    sees = vision is not None or config.model_config.is_multimodal_model
    taken = vision is not None and not vision.off and config.model_config.supports_multimodal_inputs
    if sees and not taken:
        reason = vision.off if vision is not None else ""
        get_logger().warning("images off", model=model.path, reason=reason or "vLLM takes none with this model")
    return vision if taken else None


def _start_error(path: str, error: Exception, log: EngineLog) -> ModelError | EngineError:
    """vLLM itself says only "Engine core initialization failed"; the cause is in the core's log."""
    if (cause := log.last_cause()) is not None:
        return ModelError(f"{path}: vLLM did not start: {cause}")
    return EngineError(f"{path}: vLLM did not start, and its core gave no reason: {error}; set VLLM_LOGGING_LEVEL=INFO")


def _plain(error: Exception, log: EngineLog) -> str:
    """A pydantic error without its frame, anything else as it is; with what vLLM logged as its cause."""
    text = str(error)
    if hasattr(error, "errors"):
        problems: list[dict[str, Any]] = cast(Any, error).errors()
        text = "; ".join(problem["msg"] for problem in problems)
    return ": ".join(part for part in (" ".join(text.split()) or type(error).__name__, log.last_cause()) if part)


def _facts(model: ModelConfig, config: Any, tokenizer: Any, *, supports_vlm: bool, guarded: bool) -> EngineFacts:
    import vllm

    text = config.model_config
    flags = [f"runner={'v2' if config.use_v2_model_runner else 'v1'}"]
    if text.enforce_eager:
        flags.append("eager")
    if config.parallel_config.tensor_parallel_size > 1:
        flags.append(f"tensor_parallel={config.parallel_config.tensor_parallel_size}")
    return EngineFacts(
        name="vllm",
        engine_version=vllm.__version__,
        device=str(config.device_config.device_type),
        dtype=str(text.dtype).removeprefix("torch."),
        model=model.path,
        vocab_size=text.get_vocab_size(),
        eos_token_ids=eos_token_ids(_eos_sources(config.model_config, tokenizer)),
        context_length=text.max_model_len,
        supports_vlm=supports_vlm,
        repeat_terminate=guarded,
        flags=tuple(flags),
    )


def _eos_sources(model: Any, tokenizer: Any) -> list[Any]:
    """As on the hf backend."""
    generation = model.try_get_generation_config().get("eos_token_id")
    if generation is None:
        # Where there is one, the id in the text part's config may be no more than its class's default.
        generation = getattr(model.hf_text_config, "eos_token_id", None)
    return [generation, getattr(model.hf_config, "eos_token_id", None), tokenizer.eos_token_id]
