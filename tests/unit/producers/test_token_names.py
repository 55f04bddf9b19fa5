"""A token's text and bytes, as logprobs carry them: together they are the text's bytes."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.producers.tokenizer import token_namer
from tests.tiny_models import build_tokenizer


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Llama's kind: spaces as \\u2581, and bytes for what the vocabulary lacks."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    merges = [("\u2581", "a"), ("a", "b")]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


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
