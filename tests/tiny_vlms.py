"""Tiny random vision-language models as whole directories: a LLaVA, and a Qwen2.5-VL with its pixel budgets.

- Weights are wide, in the vision part too: greedy decoding is stable, and the image decides what is decoded.
- LLaVA makes `LLAVA_IMAGE_TOKENS` tokens of every image; Qwen2.5-VL makes one for every `QWEN_TOKEN_EDGE` squared
  pixels of the resized image.
- The templates are of both kinds: LLaVA's knows parts only, Qwen's takes strings and parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny_models import build_tokenizer

VLM_CONTEXT = 512
LLAVA_IMAGE_TOKENS = 16
QWEN_TOKEN_EDGE = 8
_IMAGE_EDGE, _PATCH = 32, 8
_QWEN_MIN_PIXELS, _QWEN_MAX_PIXELS = 16 * 16, 48 * 48
_STD = 0.3

LLAVA_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>\n{% endif %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def save_tiny_llava(directory: Path, *, seed: int = 0) -> Path:
    """Write a LLaVA: a CLIP of two layers, and a Qwen3 of two layers and head size 32 (vLLM's CPU attention)."""
    tokenizer = vlm_tokenizer(["<image>"])
    config = LlavaConfig(
        text_config=Qwen3Config(**tiny_text(tokenizer), head_dim=32, hidden_size=64, intermediate_size=128),
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            projection_dim=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=_IMAGE_EDGE,
            patch_size=_PATCH,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=LLAVA_IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    edges = {"height": _IMAGE_EDGE, "width": _IMAGE_EDGE}
    torch.manual_seed(seed)
    save_wide(LlavaForConditionalGeneration(config), directory)
    LlavaProcessor(
        image_processor=LlavaImageProcessorPil(size={"shortest_edge": _IMAGE_EDGE}, crop_size=edges),
        tokenizer=tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        chat_template=LLAVA_TEMPLATE,
        num_additional_image_tokens=1,  # CLIP's class token, which "default" drops again
    ).save_pretrained(directory)
    return directory


def save_tiny_qwen_vl(directory: Path, *, seed: int = 0) -> Path:
    """Write a Qwen2.5-VL: mRoPE, pixel budgets; 4 to 36 tokens an image."""
    specials = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = vlm_tokenizer(specials)
    token_ids = dict(zip(specials, tokenizer.convert_tokens_to_ids(specials), strict=True))
    config = Qwen2_5_VLConfig(
        text_config={
            **tiny_text(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": QWEN_TOKEN_EDGE // 2,
            "spatial_merge_size": 2,
            "window_size": 2 * QWEN_TOKEN_EDGE,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 128,
        },
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    save_wide(Qwen2_5_VLForConditionalGeneration(config), directory)
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": _QWEN_MIN_PIXELS, "longest_edge": _QWEN_MAX_PIXELS},
        patch_size=QWEN_TOKEN_EDGE // 2,
        merge_size=2,
    ).save_pretrained(directory)
    tokenizer.chat_template = QWEN_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """RGB blotches, of some 8 pixels each."""
    grains = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(grains).resize((width, height))


def vlm_tokenizer(specials: list[str]) -> Any:
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = None
    tokenizer.model_max_length = VLM_CONTEXT
    return tokenizer


def tiny_text(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": VLM_CONTEXT,
        "initializer_range": _STD,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }


def save_wide(model: Any, directory: Path) -> None:
    """Every matrix wide, in the vision part as well."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, _STD)
    model.save_pretrained(directory)
