"""The model of the digits task: patch embeddings initialised from pixels.

- They start as a random projection of their pixels, so similar patches start as neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from sluice.demo.digits.patches import NUM_PATCHES, codebook, patch_token
from sluice.demo.digits.tokenizer import build_tokenizer
from sluice.demo.tiny import model as tiny
from sluice.demo.tiny.model import save_model

__all__ = ["ModelSettings", "build_model", "save_model"]

_PIXEL_MAX = 16.0


@dataclass(frozen=True)
class ModelSettings(tiny.ModelSettings):
    """Network shape, and how much the pixels determine a patch's initial embedding."""

    patch_init_scale: float = 3.0


def build_model(settings: ModelSettings, tokenizer: Any = None) -> Qwen3ForCausalLM:
    """A fresh fp32 model in training mode; the same settings always give the same weights."""
    tokenizer = tokenizer or build_tokenizer()
    first = tokenizer.convert_tokens_to_ids(patch_token(0))
    return tiny.build_model(settings, tokenizer, lambda model: _place_patches(model, settings, first))


def _place_patches(model: Qwen3ForCausalLM, settings: ModelSettings, first: int) -> None:
    """Initialise the patch embeddings from their pixels, plus a little of their random values."""
    generator = torch.Generator().manual_seed(settings.seed)
    pixels = torch.from_numpy(codebook()) / _PIXEL_MAX
    projection = torch.randn(pixels.shape[1], settings.hidden_size, generator=generator) * tiny.INIT_STD
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight[first : first + NUM_PATCHES]
    rows.copy_(settings.patch_init_scale * pixels @ projection + 0.3 * rows)
