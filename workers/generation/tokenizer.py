"""The tokenizer of a model directory."""

from __future__ import annotations

from typing import Any

from pipeline.errors import ModelError
from pipeline.prompts.chat_template import settle
from workers.generation.preprocess import normalise_tokenizer


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        return settle(normalise_tokenizer(tokenizer))
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{path}: no usable tokenizer ({error}); save it beside the weights") from error
