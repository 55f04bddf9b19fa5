"""Loading a causal language model: path, dtype, device, attention, end-of-sequence ids, in one place.

- Every parameter must come from the files; transformers would fill what is missing with random numbers.
- Failures are ModelError and say what is wrong, where, and how to mend it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from pipeline.config.types import ModelConfig
from pipeline.errors import ModelError
from workers.generation.backends.hf import attention
from workers.generation.chat_template import load_tokenizer
from workers.generation.contracts import EngineFacts

_CACHEABLE = {"full_attention", "sliding_attention"}
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to decode, in evaluation mode."""

    module: Any  # transformers.PreTrainedModel
    tokenizer: Any
    facts: EngineFacts
    pad_token_id: int
    last_logits_only: dict[str, int]  # forward arguments that ask for the last position's logits


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model of `config.path`. Raises ModelError."""
    _check_directory(config.path)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    tokenizer = load_tokenizer(config.path, trust_remote_code=config.trust_remote_code)
    module = _load_module(config, dtype).to(device).eval().requires_grad_(False)
    _check_layers(module, config.path)
    text = module.config.get_text_config()
    keeps = "logits_to_keep" in inspect.signature(module.forward).parameters
    eos = _eos_token_ids(module, tokenizer)
    facts = EngineFacts(
        name="hf",
        engine_version=transformers.__version__,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        model=config.path,
        vocab_size=module.get_input_embeddings().num_embeddings,
        eos_token_ids=eos,
        context_length=int(getattr(text, "max_position_embeddings", None) or tokenizer.model_max_length),
    )
    pad = tokenizer.pad_token_id
    return LoadedModel(module, tokenizer, facts, 0 if pad is None else pad, {"logits_to_keep": 1} if keeps else {})


def _check_directory(path: str) -> None:
    if not path:
        raise ModelError("model.path is empty; set it to a model directory")
    directory = Path(path)
    if not directory.exists():
        if directory.is_absolute() or path.startswith("."):
            raise ModelError(f"{path}: no such directory; set model.path to a model directory")
        return  # may be a name in the local hub cache
    if not (directory / "config.json").is_file():
        raise ModelError(f"{path}: no config.json, so no model directory (save_pretrained writes one)")
    if not any(any(directory.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        raise ModelError(f"{path}: no weights (model.safetensors); copy them there or export the model again")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"model.device {name!r} is no device; use auto, cpu or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device is {name!r}, but torch sees no CUDA device; use auto or cpu")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _load_module(config: ModelConfig, dtype: torch.dtype) -> Any:
    attention.register()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{config.path}: the model cannot be loaded: {error}") from error
    module, report = loaded
    bad = sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"]))
    if bad:
        raise ModelError(f"{config.path}: the weights do not fill the model, e.g. {bad[0]}; export it again")
    grouped = config.attn_implementation is None and module.config._attn_implementation == "sdpa"
    if grouped and module._supports_attention_backend:
        module.set_attn_implementation(attention.NAME)
    return module


def _check_layers(module: Any, path: str) -> None:
    text = module.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if module.config.is_encoder_decoder or kinds - _CACHEABLE:
        what = ", ".join(sorted(kinds - _CACHEABLE)) or "an encoder"
        raise ModelError(f"{path}: the hf backend decodes attention-only decoders; this model has {what}")


def _eos_token_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """All ids that any of generation config, config and tokenizer names; -1 means none."""
    generation = getattr(module, "generation_config", None)
    sources = (getattr(generation, "eos_token_id", None), module.config.eos_token_id, tokenizer.eos_token_id)
    found: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, (list, tuple)) else [source]:
            if token is not None and token >= 0:
                found[int(token)] = None
    return tuple(found)
