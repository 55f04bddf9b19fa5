"""The files beside the model's weights: tokenizer, chat template and image processor, as Qwen3-VL has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sluice.demo.digits.scenes import WORDS
from sluice.demo.digits.tokenizer import STRUCTURE
from sluice.demo.pictures.data import CANVAS, SCALE
from sluice.demo.tiny import tokenizer as tiny

IMAGE_TOKEN = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN, "<|video_pad|>")
PATCH, MERGE, FRAMES = 8, 2, 2
"""Pixels of a patch's side, patches of a token's side, and frames of a patch: a still image counts twice."""

_PIXELS = CANVAS.height * CANVAS.width * SCALE**2

CHAT_TEMPLATE = """\
{#- ChatML with images. `enable_thinking` is accepted and has no effect: this model never thinks aloud. -#}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content or [] -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The digits task's words and chunks, and the marks of an image instead of patch tokens."""
    words = [*(str(number) for number in range(1000)), *WORDS]
    tokenizer = tiny.build_tokenizer(words=words, chunks=STRUCTURE, special=VISION_TOKENS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_image_processor() -> Any:
    """Leaves a scene's pixels as they are, scaled to -1..1; other images are resized to about as many."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=FRAMES,
        size={"shortest_edge": _PIXELS // 2, "longest_edge": _PIXELS},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def save_model(model: Any, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write weights and configuration, tokenizer and image processor, as `AutoProcessor` finds them."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    build_image_processor().save_pretrained(directory)
