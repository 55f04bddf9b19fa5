"""The text comes out whole, in pieces that never wait longer than an unfinished character, at a bounded cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.errors import EngineError
from sluice.workers.engine.plugins.base import Decode, TextWindow, decoder
from tests.tiny_models import sentence_pieces
from tests.unit.workers.plugins.vocabularies import KINDS, spell, tokenizer_of


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.booleans(), st.data())
def test_pieces_and_what_is_kept_back_are_the_text(kind: str, special: bool, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    decode = decoder(tokenizer, special_tokens=special)
    window, text = TextWindow(0, decode), ""
    for count, token in enumerate(tokens, start=1):
        text += window.push(token)
        whole = decode(tokens[:count])
        assert text + window.pending() == whole
        assert window.pending().strip("\ufffd") == ""
        assert text + window.peek(tokens[0]) == decode([*tokens[:count], tokens[0]])


@settings(max_examples=40, deadline=None)
@given(st.text(st.sampled_from('{}[]:,"ab12 é東🙂'), max_size=20))
def test_a_dropped_first_space_and_byte_tokens(text: str) -> None:
    tokenizer = tokenizer_of("pieces")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    window = TextWindow(0, decoder(tokenizer, special_tokens=True))
    assert "".join(map(window.push, tokens)) == text.removeprefix(" ")


@pytest.mark.parametrize("count", [1, 63, 64, 200])
def test_the_space_after_special_tokens_is_kept_however_many_they_are(count: int) -> None:
    tokenizer: Any = sentence_pieces(strip=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    word, special = tokenizer.convert_tokens_to_ids(["\u2581a", "<|tool|>"])
    window = TextWindow(0, decoder(tokenizer, special_tokens=False))
    assert "".join(map(window.push, [word, *[special] * count, word, word])) == "a a a"


def test_the_prompt_is_left_out_and_tokens_are_read_once() -> None:
    tokenizer = tokenizer_of("plain")
    prompt, tokens = tokenizer.encode("the {"), tokenizer.encode("a東b")
    window = TextWindow(len(prompt), decoder(tokenizer, special_tokens=False))
    ids = torch.tensor([[*prompt, *tokens]])
    pieces = [window.take(ids[:, :end]) for end in range(len(prompt), ids.shape[1] + 1)]
    assert "".join(pieces) == "a東b"
    assert window.take(ids) == ""


def test_hooks_of_another_sequence_are_refused() -> None:
    window = TextWindow(2, decoder(tokenizer_of("plain"), special_tokens=False))
    window.take(torch.tensor([[1, 2, 3, 4]]))
    with pytest.raises(EngineError, match="get new ones from the plugin"):
        window.take(torch.tensor([[1, 2, 3]]))
    with pytest.raises(EngineError, match="2 x 5"):
        window.take(torch.tensor([[1, 2, 3, 4, 5]] * 2))


@pytest.mark.parametrize("text", ["{}" * 400, "東京" * 200, "<|im_end|>" * 400, None])
def test_the_cost_of_a_token_is_bounded(text: str | None) -> None:
    """No decoder call sees more tokens than a constant; None: nothing but bytes that begin no character."""
    tokenizer = tokenizer_of("plain")
    tokens = (
        tokenizer.encode(text, add_special_tokens=False) if text else [spell("plain", "東", random.Random(0))[1][0]]
    )
    longest = 0
    whole = decoder(tokenizer, special_tokens=False)

    def counted(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return whole(token_ids)

    decode: Decode = counted
    window = TextWindow(0, decode)
    for token in tokens:
        window.push(token)
    assert 1 <= longest <= 130
