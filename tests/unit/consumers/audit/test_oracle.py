"""What the audit computes its numbers with: transformers' own model of each architecture, text alone, and all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sluice.consumers.audit.recompute import logprobs_of, open_version
from sluice.consumers.audit.stored import Stored
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.weights.versions import write_version
from sluice.pipeline.wire.messages import WeightVersion
from sluice.pipeline.wire.tokens import TokenArray
from tests.factories import training_sample

LENGTH, WINDOW, VOCAB = 40, 8, 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGHT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "patch_size": 8}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
IMAGE_IDS: dict[str, Any] = {"boi_token_index": 91, "eoi_token_index": 92}


def mistral() -> Any:
    config = transformers.MistralConfig(**TEXT, head_dim=8, sliding_window=WINDOW)
    return transformers.MistralForCausalLM(config)


def gpt_oss() -> Any:
    sizes: Any = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**TEXT, head_dim=8, **sizes))


def deepseek_v3() -> Any:
    ranks: Any = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sizes: Any = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**TEXT, **ranks, **sizes, **EXPERTS))


def qwen3_next() -> Any:
    sizes: Any = {"num_experts": 4, "shared_expert_intermediate_size": 16, "head_dim": 8}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**TEXT, **LINEAR, **EXPERTS, **sizes))


def gemma3() -> Any:
    layers: Any = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
    text: Any = transformers.Gemma3TextConfig(**TEXT, **layers, head_dim=8, query_pre_attn_scalar=8)
    sight: Any = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "image_size": 16, **SIGHT}
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=text, vision_config=sight, mm_tokens_per_image=4, image_token_index=90, **IMAGE_IDS
        )
    )


def llama4() -> Any:
    sizes: Any = {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    layers: Any = {"attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0]}
    outputs = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
    sight: Any = {"num_hidden_layers": 1, "image_size": 16, **SIGHT, **outputs}
    config: Any = transformers.Llama4Config(
        text_config=transformers.Llama4TextConfig(**TEXT, **sizes, **layers),
        vision_config=sight,
        image_token_index=90,
        **IMAGE_IDS,
    )
    return transformers.Llama4ForConditionalGeneration(config)


def qwen3_5() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text: Any = {**TEXT, **LINEAR, "head_dim": 8, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}}
    sizes = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
    sight: Any = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 8, "spatial_merge_size": 2, **sizes}
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text, vision_config=sight, image_token_id=90, video_token_id=93)
    )


def llava() -> Any:
    sight: Any = {"num_hidden_layers": 1, "image_size": 16, "projection_dim": 32, **SIGHT}
    config: Any = transformers.LlavaConfig(
        text_config=transformers.Qwen3Config(**TEXT, head_dim=8),
        vision_config=transformers.CLIPVisionConfig(**sight),
        image_token_index=90,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return transformers.LlavaForConditionalGeneration(config)


ARCHITECTURES: tuple[Callable[[], Any], ...] = (
    mistral, gpt_oss, deepseek_v3, qwen3_next, gemma3, llama4, qwen3_5, llava
)  # fmt: skip


def published(model: Any, directory: Path) -> Path:
    """The root of version 0."""
    model.save_pretrained(directory / "model")
    write_version(directory / "model", directory / "weights", WeightVersion(version=0, path="", digest=""))
    return directory / "weights"


def wide(build: Callable[[], Any]) -> Any:
    """Weights with which every token depends on what came before it."""
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def stored(token_ids: list[int]) -> Stored:
    size = len(token_ids)
    sample = training_sample("s:0", size, token_ids=TokenArray(token_ids))
    ints, floats = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.float32)
    return Stored(1, sample, np.array(token_ids, dtype=np.int32), ints, ints, floats, ints, floats)


@pytest.mark.parametrize("build", ARCHITECTURES, ids=lambda build: build.__name__)
def test_the_passes_are_those_of_the_model_that_was_saved(build: Callable[[], Any], tmp_path: Path) -> None:
    """Beyond the window; of a multimodal checkpoint the text model, with none of its tensors left random."""
    model = wide(build)
    token_ids = torch.randint(3, 80, (LENGTH,)).tolist()
    root = published(model, tmp_path)
    loaded = open_version(root, 0, ModelConfig(device="cpu"))
    got = logprobs_of(loaded, stored(token_ids), np.arange(LENGTH))
    with torch.inference_mode():
        table = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].log_softmax(-1)
    wanted = [float(table[at - 1, token_ids[at]]) for at in range(1, LENGTH)]
    np.testing.assert_allclose(got[1:], wanted, atol=1e-4)
    assert np.std(wanted) > 0.3


def test_a_version_that_lacks_a_tensor_is_no_oracle(tmp_path: Path) -> None:
    """transformers would make it up."""
    mistral_directory = tmp_path / "model"
    wide(mistral).save_pretrained(mistral_directory)
    file = mistral_directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    write_version(mistral_directory, tmp_path / "weights", WeightVersion(version=0, path="", digest=""))
    with pytest.raises(ModelError, match=r"1 tensors of the model are missing from its files, .*down_proj"):
        open_version(tmp_path / "weights", 0, ModelConfig(device="cpu"))
