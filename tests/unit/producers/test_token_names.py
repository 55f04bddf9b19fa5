"""A token's text and bytes, as logprobs carry them: together they are the text's bytes."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.producers.tokenizer import token_namer
from tests.tiny_models import build_tokenizer, sentence_pieces


@pytest.mark.parametrize("tokenizer", [build_tokenizer(), sentence_pieces()], ids=["byte-level", "byte fallback"])
@pytest.mark.parametrize("text", ["ab abc", " the é ☃ 🙂", "a\nb", "\x00\x7f"])
def test_the_bytes_of_the_tokens_are_those_of_the_text(tokenizer: Any, text: str) -> None:
    named = token_namer(Renderer(tokenizer, ()))
    entries = [named(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()
    whole = [entry for entry in entries if "\ufffd" not in entry["token"]]
    assert all(entry["token"].encode() == bytes(entry["bytes"]) for entry in whole)
    assert (len(whole) < len(entries)) == (not text.isascii()), "a part of a character has bytes, and no text"


def test_special_tokens_are_their_text_and_unused_ids_are_empty() -> None:
    tokenizer: Any = build_tokenizer()
    named = token_namer(Renderer(tokenizer, ()))
    assert named(tokenizer.eos_token_id) == {"token": "<|im_end|>", "bytes": list(b"<|im_end|>")}
    assert named(len(tokenizer) + 5) == {"token": "", "bytes": []}
