"""Every supported family of vision-language models as a tiny random directory, with its own processor.

- `FAMILIES` is the matrix that engine and trainer tests run over; each entry writes a whole model directory.
- Weights are wide, in the vision part too: what is decoded depends on the images and on their order.
- The context holds a prompt with four images of `SIZES`, and some 200 tokens more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny_models import wrapped
from tests.tiny_vlms import (
    QWEN_TEMPLATE,
    QWEN_TOKEN_EDGE,
    picture,
    save_tiny_llava,
    save_tiny_qwen_vl,
    save_wide,
    tiny_text,
    vlm_tokenizer,
)

SIZES = ((40, 24), (24, 40), (64, 64), (33, 20))
"""Width and height of the pictures in tests, in order: each becomes another number of tokens where that depends."""

_VISION_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": QWEN_TOKEN_EDGE // 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 128,
}
_TILE = 32  # pixels, of Idefics3
_IDEFICS_MARKS = [
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]
_GEMMA_MARKS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def pictures(count: int, seed: int = 0) -> list[Any]:
    """So many different RGB images."""
    return [picture(*SIZES[number % len(SIZES)], seed=seed + number) for number in range(count)]


def save_tiny_qwen3_vl(directory: Path, *, seed: int = 0) -> Path:
    """Write a Qwen3-VL: interleaved mRoPE, features of the vision tower added to a decoder layer (deepstack)."""
    tokenizer = vlm_tokenizer(_VISION_MARKS)
    config = Qwen3VLConfig(
        text_config={
            **tiny_text(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 128,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        **_qwen_ids(tokenizer),
    )
    torch.manual_seed(seed)
    save_wide(Qwen3VLForConditionalGeneration(config), directory)
    return _save_qwen_processor(tokenizer, directory)


def save_tiny_qwen3_5_vl(directory: Path, *, seed: int = 0) -> Path:
    """Write a Qwen3.5 in its multimodal form: a layer with linear attention (a state), a layer with attention."""
    tokenizer = vlm_tokenizer(_VISION_MARKS)
    config = Qwen3_5Config(
        text_config={
            **tiny_text(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 128,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        vision_config=dict(_QWEN_VISION),
        **_qwen_ids(tokenizer),
    )
    torch.manual_seed(seed)
    save_wide(Qwen3_5ForConditionalGeneration(config), directory)
    return _save_qwen_processor(tokenizer, directory)


def save_tiny_idefics3(directory: Path, *, seed: int = 0) -> Path:
    """Write an Idefics3: an image becomes up to four tiles and itself, 4 tokens each, between marks."""
    tokenizer = vlm_tokenizer(_IDEFICS_MARKS)
    config = Idefics3Config(
        text_config={**tiny_text(tokenizer), "model_type": "llama", "hidden_size": 128, "intermediate_size": 128},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _TILE,
            "patch_size": 8,
        },
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    save_wide(Idefics3ForConditionalGeneration(config), directory)
    Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * _TILE}, max_image_size={"longest_edge": _TILE}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=_template("<image>"),
    ).save_pretrained(directory)
    return directory


def save_tiny_gemma3(directory: Path, *, seed: int = 0) -> Path:
    """Write a Gemma3: image tokens see each other in both directions; a window shorter than a prompt of images.

    The tokenizer merges line breaks, and an image has blank lines around it: they merge with those of the text.
    """
    tokenizer = _gemma_tokenizer()
    text = tiny_text(tokenizer)
    config = Gemma3Config(
        text_config={
            **text,
            "hidden_size": 64,
            "intermediate_size": 128,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
        },
        mm_tokens_per_image=16,
        boi_token_index=tokenizer.convert_tokens_to_ids(_GEMMA_MARKS["boi_token"]),
        eoi_token_index=tokenizer.convert_tokens_to_ids(_GEMMA_MARKS["eoi_token"]),
        image_token_index=tokenizer.convert_tokens_to_ids(_GEMMA_MARKS["image_token"]),
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    save_wide(Gemma3ForConditionalGeneration(config), directory)
    Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        image_seq_length=16,
        chat_template=_template(_GEMMA_MARKS["boi_token"]),
    ).save_pretrained(directory)
    return directory


FAMILIES: Mapping[str, Callable[..., Path]] = {
    "qwen2_5_vl": save_tiny_qwen_vl,
    "qwen3_vl": save_tiny_qwen3_vl,
    "qwen3_5": save_tiny_qwen3_5_vl,
    "llava": save_tiny_llava,
    "idefics3": save_tiny_idefics3,
    "gemma3": save_tiny_gemma3,
}
"""save(directory, seed=…) of each family."""


def _qwen_ids(tokenizer: Any) -> dict[str, Any]:
    start, end, image, video = tokenizer.convert_tokens_to_ids(_VISION_MARKS)
    return {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": False,
    }


def _save_qwen_processor(tokenizer: Any, directory: Path) -> Path:
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": 16 * 16, "longest_edge": 48 * 48}, patch_size=QWEN_TOKEN_EDGE // 2, merge_size=2
    ).save_pretrained(directory)
    tokenizer.chat_template = QWEN_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def _template(image: str) -> str:
    return QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", image)


def _gemma_tokenizer() -> Any:
    """Bytes, and one token for up to four line breaks, in any surroundings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [("Ċ", "Ċ"), ("ĊĊ", "ĊĊ"), ("ĊĊ", "Ċ")]
    vocab = {entry: index for index, entry in enumerate([*alphabet, *(left + right for left, right in pieces)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=pieces))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    plain = wrapped(core, list(_GEMMA_MARKS.values()))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        extra_special_tokens=_GEMMA_MARKS,
        clean_up_tokenization_spaces=False,
        model_max_length=plain.model_max_length * 2,
    )
    tokenizer.chat_template = None
    return tokenizer
