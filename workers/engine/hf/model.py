"""Loads a language model, with its vision part if any: path, dtype, device, attention, end ids, in one place.

- A model with a vision part takes images, unless `variant` is text: then it is loaded whole and used for text only.
- Every parameter must come from the files; transformers would fill missing ones with random numbers.
- Failures are ModelError and say what is wrong, where, and how to fix it.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

from sluice.pipeline.config.types import ModelConfig, RepeatTerminateConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.images.features import ImageFeatures
from sluice.pipeline.images.processor import VisionProcessor
from sluice.workers.engine.constraints import Grammars, library
from sluice.workers.engine.contracts import EngineFacts
from sluice.workers.engine.hf.adapters import Adapters
from sluice.workers.engine.hf.cache import PrefillCache
from sluice.workers.guard.rules import GuardRules
from sluice.workers.model_files import check_directory, end_token_ids, has_vision, load_tokenizer

NO_GUARD = RepeatTerminateConfig()
GROUPED_SDPA = "sluice_grouped_sdpa"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to decode, in evaluation mode."""

    module: Any  # transformers.PreTrainedModel
    tokenizer: Any
    facts: EngineFacts
    pad_token_id: int
    keeps_last_logits: bool  # its forward can return logits of the last positions only
    adapters: Adapters  # beside its weights
    grammars: Grammars
    rope_index: Callable[..., Any] | None = None  # positions of a prompt with images, if they have 3 axes
    vision: VisionProcessor | None = None  # None: takes no images
    features: ImageFeatures | None = None  # likewise
    guard: GuardRules | None = None  # None: loops aren't ended


def load_model(
    config: ModelConfig,
    repeat_terminate: RepeatTerminateConfig = NO_GUARD,
    *,
    processed_logprobs: bool = False,
    keeps_cache: bool = False,
    feature_bytes: int = 0,
) -> LoadedModel:
    """Load the model of `config.path`. Raises ModelError, or ConfigError for a guard it can't have.

    `feature_bytes`: how much of the images' features is kept longer than the prompts that show them.
    """
    check_directory(config.path)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    has_vision = _has_vision(config)
    tokenizer = load_tokenizer(config.path, trust_remote_code=config.trust_remote_code)
    vision = VisionProcessor.load(config, transformers) if has_vision and config.variant != "text" else None
    module = _load_module(config, dtype, has_vision)
    module = (module if config.device_map else module.to(device)).eval().requires_grad_(False)
    _check_layers(module, config.path)
    takes = inspect.signature(module.forward).parameters
    facts = _facts(config, module, tokenizer, supports_vlm=vision is not None)
    guard = GuardRules.for_engine(repeat_terminate, tokenizer, facts.eos_token_ids, config.path)
    return LoadedModel(
        module,
        tokenizer,
        replace(
            facts,
            repeat_terminate=guard is not None,
            logprobs_mode="processed_logprobs" if processed_logprobs else "raw_logprobs",
            keeps_cache=keeps_cache,
        ),
        pad_token_id=0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        keeps_last_logits="logits_to_keep" in takes,
        adapters=Adapters(module),
        grammars=Grammars(lambda: tokenizer, facts.vocab_size),
        rope_index=getattr(getattr(module, "model", None), "get_rope_index", None),
        vision=vision,
        features=None if vision is None else ImageFeatures(module, torch, max_bytes=feature_bytes),
        guard=guard,
    )


def _facts(config: ModelConfig, module: Any, tokenizer: Any, *, supports_vlm: bool) -> EngineFacts:
    text = module.config.get_text_config()
    return EngineFacts(
        name="hf",
        engine_version=transformers.__version__,
        device=str(module.device),
        dtype=str(module.dtype).removeprefix("torch."),
        model=config.path,
        vocab_size=module.get_input_embeddings().num_embeddings,
        eos_token_ids=end_token_ids(
            getattr(getattr(module, "generation_config", None), "eos_token_id", None),
            getattr(text, "eos_token_id", None),
            getattr(module.config, "eos_token_id", None),
            tokenizer.eos_token_id,
        ),
        context_length=int(getattr(text, "max_position_embeddings", None) or tokenizer.model_max_length),
        supports_vlm=supports_vlm,
        hooks=frozenset({"stopping_criteria", "logits_processor"}),
        grammars=library(),
        flags=(f"attention={text._attn_implementation}",),
    )


def _has_vision(config: ModelConfig) -> bool:
    """Whether the model of this directory sees images. Raises ModelError."""
    try:
        found: Any = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"{config.path}: config.json cannot be used: {error}") from error
    return has_vision(config, found)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"model.device {name!r} is not a device; use auto, cpu or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device is {name!r}, but torch sees no CUDA device; use auto or cpu")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _load_module(config: ModelConfig, dtype: torch.dtype, has_vision: bool) -> Any:
    if config.device_map and importlib.util.find_spec("accelerate") is None:
        raise ModelError("model.device_map needs the package accelerate; install it, or remove device_map")
    register_attention()
    transformers_logging.disable_progress_bar()
    kind = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    try:
        loaded: Any = kind.from_pretrained(
            config.path,
            dtype=dtype,
            device_map=config.device_map,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{config.path}: the model cannot be loaded: {error}") from error
    module, report = loaded
    bad = sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"]))
    if bad:
        raise ModelError(f"{config.path}: the weights are incomplete, e.g. {bad[0]}; export them again")
    _group_attention(config, module)
    return module


def _group_attention(config: ModelConfig, module: Any) -> None:
    """Use our attention for the decoding part, unless another one is configured."""
    grouped = config.attn_implementation is None and module.config.get_text_config()._attn_implementation == "sdpa"
    if grouped and module._supports_attention_backend:
        has_parts = "text_config" in module.config.sub_configs
        module.set_attn_implementation({"text_config": GROUPED_SDPA} if has_parts else GROUPED_SDPA)


def _check_layers(module: Any, path: str) -> None:
    if module.config.is_encoder_decoder:
        raise ModelError(f"{path}: the hf backend supports decoder-only models; this one has an encoder")
    try:
        PrefillCache(module.config)
    except (ModelError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: {type(module).__name__}: {error}; use worker.backend=vllm or another model"
        ) from error


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output (rows, q, heads, dim) and no weights.

    `query` is (rows, heads, q, dim), `key` and `value` are (rows, kv_heads, length, dim).
    """
    rows, heads, q_length, dim = query.shape
    groups = heads // key.shape[1]
    if q_length != 1 or groups == 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, key.shape[1], groups, dim),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def register_attention() -> None:
    """Register `attn_implementation=NAME` with transformers; safe to repeat."""
    AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
    AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
