"""The architecture matrix: a tiny random model of each, complete, with windows and chunks of `WINDOW` tokens.

- Weights are large, so a lost window, a mixed-up sample or a stale state changes a logprob by nats, not by noise.
- All share one byte-level tokenizer; special tokens come last.
- Models with a vision part are full multimodal checkpoints, used for text.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

from sluice.bench.models import byte_tokenizer

WINDOW = 8
CONTEXT = 512
_SPECIALS = ("<|pad|>", "<|image|>", "<|video|>", "<|vision_start|>", "<|vision_end|>", "<|end|>")
_VOCABULARY = 256 + len(_SPECIALS)
_PAD, _IMAGE, _VIDEO, _VISION_START, _VISION_END, _END = range(256, _VOCABULARY)
_STD = 0.2
_STD_STATES = 0.07  # beyond this, transformers' own recurrent and chunked kernels differ by more than 1e-4 in float32

Config = Any  # transformers.PreTrainedConfig
hf: Any = transformers  # its configuration classes don't declare every argument they accept


_SHAPE = {  # of the text part; head size 32, which vLLM's CPU attention supports
    "vocab_size": _VOCABULARY, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "bos_token_id": None,
    "eos_token_id": _END, "pad_token_id": _PAD, "tie_word_embeddings": False,
}  # fmt: skip


def _text(**own: Any) -> dict[str, Any]:
    return {**_SHAPE, **own}


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_NET = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_LLAMA4 = {
    "head_dim": 32, "num_hidden_layers": 4, "intermediate_size_mlp": 96, "num_local_experts": 4,
    "num_experts_per_tok": 1, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3],
}  # fmt: skip
_GEMMA3 = {"head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 6, "query_pre_attn_scalar": 32}
_MAMBA = {"mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_chunk_size": WINDOW}
_GRANITE = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "mamba_n_heads": 8,
    "mamba_expand": 1, **_MAMBA,
}  # fmt: skip
_DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_GLM4 = {
    "head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_GPT_2 = {
    "vocab_size": _VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "bos_token_id": None,
    "eos_token_id": _END, "pad_token_id": _PAD,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_QWEN_TOKENS = {
    "image_token_id": _IMAGE, "video_token_id": _VIDEO, "vision_start_token_id": _VISION_START,
    "vision_end_token_id": _VISION_END,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "out_hidden_size": 128,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_LLAMA4_VISION = {
    **_SIGLIP, "intermediate_size": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    "vision_output_dim": 32, "pixel_shuffle_ratio": 0.5,
}  # fmt: skip


def _plain(kind: str, **own: Any) -> Callable[[], Config]:
    return lambda: getattr(hf, kind)(**_text(**own))


def _seeing(kind: str, text: Any, vision: Any, **own: Any) -> Callable[[], Config]:
    parts = {"text_config": text, "vision_config": vision}
    return lambda: getattr(hf, kind)(**deepcopy(parts), tie_word_embeddings=False, **own)


ARCHITECTURES: dict[str, Callable[[], Config]] = {
    "Qwen2": _plain("Qwen2Config"),
    "Qwen2 (window)": _plain(
        "Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, num_hidden_layers=3
    ),
    "Qwen3": _plain("Qwen3Config", head_dim=32),
    "Qwen3-MoE": _plain("Qwen3MoeConfig", head_dim=32, **_EXPERTS),
    "Qwen3-Next": _plain("Qwen3NextConfig", shared_expert_intermediate_size=32, **_EXPERTS, **_DELTA_NET),
    "Qwen3.5": _plain("Qwen3_5TextConfig", **_DELTA_NET),
    "Qwen3.5-MoE": _plain("Qwen3_5MoeTextConfig", shared_expert_intermediate_size=32, **_EXPERTS, **_DELTA_NET),
    "Llama": _plain("LlamaConfig"),
    "Llama4": _plain("Llama4TextConfig", **_LLAMA4),
    "Mistral (window)": _plain("MistralConfig", sliding_window=WINDOW),
    "Mixtral": _plain("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "Gemma2": _plain("Gemma2Config", head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32),
    "Gemma3": _plain("Gemma3TextConfig", **_GEMMA3),
    "Phi3": _plain("Phi3Config", sliding_window=WINDOW),
    "OLMo3": _plain("Olmo3Config", sliding_window=WINDOW, num_hidden_layers=4),
    "Cohere2": _plain("Cohere2Config", sliding_window=WINDOW, num_hidden_layers=4),
    "GLM4-MoE": _plain("Glm4MoeConfig", **_GLM4),
    "GPT-2": lambda: hf.GPT2Config(**_GPT_2),
    "SmolLM3": _plain("SmolLM3Config", num_hidden_layers=4),
    "LFM2": _plain("Lfm2Config", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    "Falcon-H1": _plain("FalconH1Config", head_dim=32, mamba_d_ssm=64, mamba_n_heads=4, mamba_expand=1, **_MAMBA),
    "Granite-hybrid": _plain("GraniteMoeHybridConfig", **_GRANITE),
    "DeepSeek-V3": _plain("DeepseekV3Config", **_DEEPSEEK),
    "GPT-OSS": _plain("GptOssConfig", head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    "LLaVA": lambda: hf.LlavaConfig(
        text_config=hf.Qwen3Config(**_text(head_dim=32)),
        vision_config=hf.CLIPVisionConfig(projection_dim=32, **_SIGLIP),
        image_token_index=_IMAGE, image_seq_length=16, vision_feature_layer=-1, tie_word_embeddings=False,
    ),
    "Qwen2.5-VL": _seeing(
        "Qwen2_5_VLConfig", _text(rope_parameters=_MROPE),
        {**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}, **_QWEN_TOKENS,
    ),
    "Qwen3-VL": _seeing(
        "Qwen3VLConfig", _text(head_dim=32, rope_parameters={**_MROPE, "mrope_interleaved": True}),
        {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, **_QWEN_TOKENS,
    ),
    "Qwen3.5 (multimodal)": _seeing(
        "Qwen3_5Config", _text(**_DELTA_NET), {**_QWEN_VISION, "num_position_embeddings": 16}, **_QWEN_TOKENS
    ),
    "Gemma3 (multimodal)": _seeing(
        "Gemma3Config", _text(**_GEMMA3), _SIGLIP, mm_tokens_per_image=4, image_token_index=_IMAGE,
        boi_token_index=_VISION_START, eoi_token_index=_VISION_END, eos_token_id=_END,
    ),
    "Llama4 (multimodal)": _seeing("Llama4Config", _text(**_LLAMA4), _LLAMA4_VISION, image_token_index=_IMAGE),
    "Idefics3": lambda: hf.Idefics3Config(
        text_config=hf.LlamaConfig(**_text()), vision_config=_SIGLIP, image_token_id=_IMAGE, scale_factor=2,
        pad_token_id=_PAD, tie_word_embeddings=False,
    ),
}  # fmt: skip


def build(name: str, *, seed: int = 0) -> Any:
    """A model by name, in float32 and evaluation mode, of the class that loads its checkpoints."""
    config = ARCHITECTURES[name]()
    sees = getattr(config, "vision_config", None) is not None
    kind = hf.AutoModelForImageTextToText if sees else hf.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = kind.from_config(config).float().eval()
        text = config.get_text_config()
        has_states = hasattr(text, "linear_conv_kernel_dim") or hasattr(text, "mamba_d_state")
        deviation = _STD_STATES if has_states else _STD
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, deviation)
    return model


def save(name: str, directory: Path, *, seed: int = 0) -> Path:
    model = build(name, seed=seed)
    model.generation_config = hf.GenerationConfig(do_sample=False, eos_token_id=_END, pad_token_id=_PAD)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def tokenizer() -> Any:
    """256 bytes and the special tokens."""
    found = byte_tokenizer(_SPECIALS, CONTEXT)
    found.chat_template = (
        "{% for message in messages %}{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    return found
