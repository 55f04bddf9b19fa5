"""The model of the pictures task: a Qwen3-VL of a bit more than a million parameters.

pixels ──▶ patches of 8×8 ──▶ vision tower ──▶ merger: 2×2 patches to one token ─┬─▶ decoder (the demo's Qwen3)
                                  └─▶ deepstack merger, added after the decoder's first layer ┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from sluice.demo.pictures.processor import FRAMES, IMAGE_TOKEN, MERGE, PATCH
from sluice.demo.tiny import model as tiny


@dataclass(frozen=True)
class ModelSettings(tiny.ModelSettings):
    """The decoder's shape, and the vision tower's."""

    vision_hidden_size: int = 64
    vision_intermediate_size: int = 128
    vision_layers: int = 2
    vision_heads: int = 4
    vision_positions: int = 64
    """A square of learnt positions, interpolated to the image's grid."""


def build_config(settings: ModelSettings, tokenizer: Any) -> Qwen3VLConfig:
    """The Qwen3-VL config for this tokenizer's vocabulary."""
    text = tiny.build_config(settings, tokenizer).to_dict()
    for name in ("model_type", "architectures", "layer_types", "transformers_version"):
        text.pop(name, None)
    half = settings.head_dim // 2
    side = half * 5 // 16
    sections = {"mrope_section": [half - 2 * side, side, side], "mrope_interleaved": True}
    token = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config={**text, "rope_parameters": {**text["rope_parameters"], **sections}},
        vision_config={
            "depth": settings.vision_layers,
            "hidden_size": settings.vision_hidden_size,
            "intermediate_size": settings.vision_intermediate_size,
            "num_heads": settings.vision_heads,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
            "out_hidden_size": settings.hidden_size,
            "num_position_embeddings": settings.vision_positions,
            "deepstack_visual_indexes": [0],
            "initializer_range": tiny.INIT_STD,
        },
        image_token_id=token(IMAGE_TOKEN),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="float32",
    )


def build_model(settings: ModelSettings, tokenizer: Any) -> Qwen3VLForConditionalGeneration:
    """A fresh fp32 model in training mode; the same settings always give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Qwen3VLForConditionalGeneration(build_config(settings, tokenizer)).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model.train()
