"""Object keys in what real tokenizers write: every family, every layout, and tokens that cut the key anywhere."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError
from sluice.workers.guard.object_keys import ObjectKeys, token_bytes
from sluice.workers.guard.repeat import RepeatTrigger
from sluice.workers.guard.rules import GuardRules
from tests.merged_tokenizers import BOX, FAMILIES, corpus
from tests.tiny_models import build_tokenizer
from tests.unit.workers.guard.python_tokenizers import (
    BytesAsTheyAre,
    Letters,
    Unknown,
    mistral_in_vllm,
    mistral_sentencepiece,
    mistral_tekken,
    sentencepiece_in_python,
)

PREFIX = '"object_'
SPACED = ["qwen_like", "whole_lines", "llama_like", "unigram"]


def answer(count: int, **layout: Any) -> str:
    return json.dumps(
        {f"object_{at}": {"desc": "café 東京", "bbox_2d": [at, 2, 3, 4]} for at in range(count)}, **layout
    )


OUTSIDE = [BytesAsTheyAre, Letters, mistral_tekken, mistral_sentencepiece, mistral_in_vllm, sentencepiece_in_python]
LAYOUTS: list[dict[str, Any]] = [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def counter(tokenizer: Any, prefix: str = PREFIX) -> ObjectKeys:
    return ObjectKeys.of_tokenizer(tokenizer, prefix, 20)


def test_the_key_that_is_encoded_alone_is_nowhere_in_an_answer() -> None:
    """Which is why token patterns cannot be counted: its first quote merges with what stands before it."""
    tokenizer = FAMILIES["qwen_like"]()
    alone, tokens = encoded(tokenizer, PREFIX), encoded(tokenizer, answer(300))
    found = sum(tokens[at : at + len(alone)] == alone for at in range(len(tokens)))
    assert found == 0
    assert counter(tokenizer).count(tokens) == 300


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_a_rendered_answer_is_counted_once(family: str, layout: dict[str, Any]) -> None:
    tokenizer = FAMILIES[family]()
    assert counter(tokenizer).count(encoded(tokenizer, answer(300, **layout))) == 300


@pytest.mark.parametrize("family", FAMILIES)
def test_the_guard_ends_after_the_token_that_completes_the_last_key(family: str) -> None:
    tokenizer = FAMILIES[family]()
    config = RepeatTerminateConfig(enabled=True, min_new_tokens=0, max_object_keys=7)
    rules, tokens = GuardRules.of(config, tokenizer), encoded(tokenizer, answer(20))
    written = token_bytes(tokenizer)
    text, ended = b"", None
    guard = rules.guard()
    for at, token in enumerate(tokens, 1):
        text += written.pieces[token]
        triggered = guard.push(token)
        assert (triggered is not None) == (text.count(written.of_text(PREFIX)) >= 7)
        ended = ended or (triggered and at)
    assert ended
    elsewhere = GuardRules.from_plain(json.loads(json.dumps(rules.plain())))
    assert elsewhere.guard().push_all(tokens[:ended]) == RepeatTrigger("object_keys", ended)


@pytest.mark.parametrize("family", SPACED)
def test_the_table_writes_what_was_encoded(family: str) -> None:
    tokenizer = FAMILIES[family]()
    written = token_bytes(tokenizer)
    for text in corpus()[::7]:
        tokens = encoded(tokenizer, text)
        if family == "unigram":  # its white space is one, and it has no piece for some characters
            text = " ".join(text.encode("ascii", "ignore").decode().split())
            tokens = encoded(tokenizer, text)
        assert b"".join(written.pieces[token] for token in tokens).removeprefix(b" ") == text.encode()


@pytest.mark.parametrize("family", ["wordpiece", "word_ends"])
def test_a_table_of_words_writes_the_text_without_its_spaces(family: str) -> None:
    tokenizer = FAMILIES[family]()
    written, text = token_bytes(tokenizer), corpus()[0]
    assert b"".join(written.pieces[token] for token in encoded(tokenizer, text)) == "".join(text.split()).encode()
    assert counter(tokenizer, '"big dog').count(encoded(tokenizer, '{"big dog": 1, "big  dog": 2}')) == 2


@pytest.mark.parametrize("prefix", [' "object_', '{"', '"bbox_2d": [', '"', "東京", '"café_', '"desc"', "\n", ", "])
@pytest.mark.parametrize("family", ["qwen_like", "whole_lines", "llama_like"])
def test_any_text_can_be_the_prefix(family: str, prefix: str) -> None:
    tokenizer = FAMILIES[family]()
    text = answer(30, ensure_ascii=False, indent=1) + answer(30) + '{"café_1": "東京"}'
    assert counter(tokenizer, prefix).count(encoded(tokenizer, text)) == text.count(prefix) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_are_spelled_out(family: str) -> None:
    tokenizer = FAMILIES[family]()
    special = tokenizer.convert_tokens_to_ids(BOX)
    tokens = encoded(tokenizer, f"{BOX}1{BOX}2")
    assert tokens.count(special) == 2
    assert counter(tokenizer, BOX).count(tokens) == 2
    if family in ("qwen_like", "whole_lines", "llama_like"):  # the others cannot write a part of it
        assert counter(tokenizer, "box|>").count(tokens) == 2


@given(st.lists(st.integers(0, 3), min_size=1), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_it_does_not_matter_how_a_text_was_cut_into_tokens(order: list[int], draws: random.Random) -> None:
    """A model may write any tokens: bytes alone, halves of characters, pieces that no encoder would choose there."""
    tokenizer = FAMILIES["whole_lines"]()
    pieces, prefix = token_bytes(tokenizer).pieces, '"café_'
    text = "".join((prefix, '"caf', "é_", "東")[at] for at in order).encode()
    tokens, at = list[int](), 0
    while at < len(text):
        fitting = [index for index, piece in enumerate(pieces) if piece and text.startswith(piece, at)]
        tokens.append(draws.choice(fitting))
        at += len(pieces[tokens[-1]])
    assert counter(tokenizer, prefix).count(tokens) == text.count(prefix.encode())


def test_an_id_that_the_tokenizer_does_not_know_writes_nothing() -> None:
    tokenizer: Any = build_tokenizer()
    keys, tokens = counter(tokenizer), encoded(tokenizer, PREFIX)
    for at in range(len(tokens) + 1):
        assert keys.count([*tokens[:at], len(tokenizer) + 40, *tokens[at:]]) == 1
        assert keys.count([*tokens[:at], *encoded(tokenizer, "-"), *tokens[at:]]) == (at in (0, len(tokens)))


def test_a_tokenizer_that_writes_the_prefix_otherwise_is_refused() -> None:
    from tokenizers import normalizers

    tokenizer: Any = build_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert counter(tokenizer).count(encoded(tokenizer, answer(3))) == 3
    with pytest.raises(ConfigError, match=r"prefix '\"Object_' occurs 20 times in an answer, but 0 times in .*max_obj"):
        counter(tokenizer, '"Object_')
    with pytest.raises(ConfigError, match=r"object_key_prefix '' has no bytes"):
        counter(tokenizer, "")


def test_a_decoder_that_is_not_known_is_refused() -> None:
    from tokenizers import decoders

    tokenizer: Any = build_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match=r"the guard does not support this tokenizer: its decoder has .*CTC"):
        counter(tokenizer)


@pytest.mark.vllm  # which brings the libraries of these
@pytest.mark.parametrize("make", OUTSIDE)
def test_tokenizers_outside_the_library_are_read_as_well(make: Any) -> None:
    tokenizer = make()
    tokens = encoded(tokenizer, answer(30, ensure_ascii=False))
    assert counter(tokenizer).count(tokens) == 30
    assert counter(tokenizer, "東京").count(tokens) == 30


@pytest.mark.vllm
def test_special_tokens_of_mistral_are_spelled_out() -> None:
    written = token_bytes(mistral_tekken())
    assert written.pieces[:5] == [b"<unk>", b"<s>", b"</s>", b"[INST]", b"[/INST]"]


@pytest.mark.vllm
def test_a_tokenizer_that_does_not_say_how_it_writes_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown does not expose the text of its tokens"):
        counter(Unknown())
