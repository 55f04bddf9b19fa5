"""Tiny real models for the engine tests: a random Qwen3 with a byte-level tokenizer and a ChatML template.

Weights are wide (standard deviation 0.3) so that the best two logits are apart and greedy decoding is stable.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 256
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, a few merged pieces, three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [("a", "b"), ("ab", "c"), ("t", "h"), ("th", "e")]
    vocab = {entry: index for index, entry in enumerate([*alphabet, *(left + right for left, right in pieces)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=pieces))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return wrapped(core)


def sentence_pieces(*, strip: bool = False) -> PreTrainedTokenizerFast:
    """Llama's kind: spaces as \\u2581, and bytes for what the vocabulary lacks. `strip`: a first space is dropped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    merges = [("\u2581", "a"), ("a", "b")]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def wrapped(core: Tokenizer, more_specials: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """As a model directory has it: ChatML, with the special tokens of all tiny models."""
    core.add_special_tokens([*SPECIALS, *more_specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_model(
    directory: Path, *, seed: int = 0, tied: bool = False, groups: int = 2, eos_token_id: int | None = None
) -> Path:
    """Write a 2-layer Qwen3 of head size 32 (a size that vLLM's CPU attention knows) with its tokenizer."""
    tokenizer: Any = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2 * groups,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id if eos_token_id is None else eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def quantised_copy(source: Path, target: Path) -> Path:
    """The model with int8 weights and a scale for each of their rows, as compressed-tensors stores them."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(dim=1, keepdim=True) / 127
        tensors[name], tensors[f"{name}_scale"] = (tensors[name] / scale).round().to(torch.int8), scale
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**kind, "strategy": "channel", "dynamic": False},
                "input_activations": {**kind, "strategy": "token", "dynamic": True},
            }
        },
    }
    (target / "config.json").write_text(json.dumps(config))
    return target
