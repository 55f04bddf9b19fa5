"""The demo's model: a Qwen3 of about a million parameters, small enough to learn on one CPU core.

- fp32, tied embeddings, head size 32 (which vLLM's CPU attention supports).
- Seeded random weights; a task may initialise some embedding rows itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

INIT_STD = 0.05


@dataclass(frozen=True)
class ModelSettings:
    """Network shape; sizes in units (hidden, intermediate), counts otherwise."""

    hidden_size: int = 128
    intermediate_size: int = 512
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 1000.0
    max_positions: int = 512
    seed: int = 0


def build_config(settings: ModelSettings, tokenizer: Any) -> Qwen3Config:
    """The Qwen3 config for this tokenizer's vocabulary."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        initializer_range=INIT_STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def build_model(
    settings: ModelSettings, tokenizer: Any, start: Callable[[Qwen3ForCausalLM], None] | None = None
) -> Qwen3ForCausalLM:
    """A fresh fp32 model in training mode; the same settings always give the same weights.

    `start` may change the random weights in place.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(settings.seed)
        model = Qwen3ForCausalLM(build_config(settings, tokenizer)).float()
        if start is not None:
            start(model)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model.train()


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write config, generation config, weights and tokenizer files, as transformers and vLLM load them."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
