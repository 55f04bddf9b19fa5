"""The model that every engine decodes with: a random Qwen3 of 3 million parameters, made once.

- Weights are wide, so that the best two logits are apart and greedy tokens are the same on every engine.
- Special tokens have a zero row in the (tied) embedding, so their logit is 0 and never the best: nothing ends early.
- Head size 32, which vLLM's CPU attention supports.
"""

from __future__ import annotations

import string
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

CONTEXT = 1024
_SPECIALS = ("<|pad|>", "<|end|>")
_ALPHABET = 256


@dataclass(frozen=True)
class Shape:
    """Sizes in units (hidden, intermediate), counts otherwise."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = CONTEXT
    initializer_range: float = 0.3


def ensure_model(home: Path, shape: Shape | None = None) -> Path:
    """Directory of the model and its tokenizer; made now unless an equal one is there."""
    from sluice.demo.tiny import cache

    shape = shape or Shape()
    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    target = home / f"engine-model-{cache.content_key(asdict(shape), [sys.modules[__name__]], libraries)}"
    if not target.is_dir():
        with cache.written_aside(target) as aside:
            _save(shape, aside)
    return target


def _save(shape: Shape, directory: Path) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer), bos_token_id=None, tie_word_embeddings=True, dtype="float32", **asdict(shape), **ids
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).float()
        embeddings: Any = model.get_input_embeddings()
        embeddings.weight[-len(_SPECIALS) :] = 0
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer() -> Any:
    """256 bytes, all pairs of letters and digits, the special tokens last."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    signs = string.ascii_lowercase + string.digits
    pairs = [(left, right) for left in signs for right in signs]
    vocab = {entry: index for index, entry in enumerate([*alphabet, *(left + right for left, right in pairs)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(_SPECIALS))
    pad, end = _SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=end, pad_token=pad, clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )  # fmt: skip
