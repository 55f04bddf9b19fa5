"""The sequence ends at the token that closes the first value, with json's own decoder as the oracle."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.errors import EngineError
from sluice.workers.engine.plugins.base import check_plugins
from sluice.workers.engine.plugins.json_objects import BalancedJsonStop
from tests.unit.workers.plugins.vocabularies import KINDS, grown, spell, tokenizer_of

TEXTS = st.text(st.one_of(st.sampled_from('{}[]"\\/ua:,é東🙂\n'), st.characters(codec="utf-8")), max_size=8)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
VALUES = st.recursive(
    st.one_of(st.lists(LEAVES, max_size=3), st.dictionaries(TEXTS, LEAVES, max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
OUTSIDE = st.text(st.sampled_from('}]":,a1 \n東\\'), max_size=6)


def verdicts(kind: str, tokens: list[int], prompt: str = "p", plugin: BalancedJsonStop | None = None) -> list[bool]:
    """What the criterion says after each token."""
    tokenizer = tokenizer_of(kind)
    before = tokenizer.encode(prompt, add_special_tokens=False)
    (criterion,) = (plugin or BalancedJsonStop()).stopping_criteria(len(before), tokenizer)
    said = [criterion(ids, None) for ids in grown(before, tokens)]  # pyright: ignore[reportArgumentType]
    assert all(one.shape == (1,) and one.dtype == torch.bool for one in said)
    return [bool(one) for one in said]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), VALUES, OUTSIDE, TEXTS, st.booleans(), st.sampled_from([None, 1]), st.integers(0, 9))
def test_ends_exactly_where_json_does(
    kind: str, value: Any, before: str, after: str, ascii_only: bool, indent: int | None, seed: int
) -> None:
    text = before + json.dumps(value, ensure_ascii=ascii_only, indent=indent) + after
    found, end = json.JSONDecoder().raw_decode(text, len(before))
    assert found == value
    spelled = spell(kind, text, random.Random(seed))
    closing = next(at for at, (_, size) in enumerate(spelled) if size >= len(text[:end].encode()))
    said = verdicts(kind, [token for token, _ in spelled], prompt='[{"a')
    assert said == [at >= closing for at in range(len(spelled))]
    assert BalancedJsonStop().clean_text(text) == text[:end]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), VALUES, st.integers(0, 9))
def test_a_value_that_does_not_close_ends_nothing(kind: str, value: Any, seed: int) -> None:
    text = json.dumps(value, ensure_ascii=False)[:-1]
    assert not any(verdicts(kind, [token for token, _ in spell(kind, text, random.Random(seed))]))
    assert BalancedJsonStop().clean_text(text) == text


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("} ] no value", "} ] no value"),
        ("", ""),
        ('a quote: "{ } x', 'a quote: "{ }'),  # outside of a value it begins no string
        ('so: {"a": "\\"}"} and {}', 'so: {"a": "\\"}"}'),
        ('{"a": "\\\\"} "}', '{"a": "\\\\"}'),
        ('{"\\u007d": 1} x', '{"\\u007d": 1}'),
        ("{]} x", "{]}"),
        ('[1, {"a": [2]}] [3]', '[1, {"a": [2]}]'),
    ],
)
def test_cut_text(text: str, cleaned: str) -> None:
    assert BalancedJsonStop().clean_text(text) == cleaned


def test_text_beyond_the_bracket_in_its_token_is_cut() -> None:
    tokenizer = tokenizer_of("odd")
    tokens = [tokenizer.convert_tokens_to_ids(token) for token in ('[{"', "a", '"', ":", "1", "}Ġ]x")]
    assert verdicts("odd", tokens) == [False] * 5 + [True]
    assert BalancedJsonStop().clean_text(tokenizer.decode(tokens)) == '[{"a":1} ]'


def test_a_bracket_before_an_unfinished_character_counts_at_once() -> None:
    token = tokenizer_of("odd").convert_tokens_to_ids("}æĿ")
    assert verdicts("odd", [*tokenizer_of("odd").encode("{"), token]) == [False, True]


def test_the_prompt_never_counts() -> None:
    tokens = tokenizer_of("plain").encode('}{"b": 2}')
    said = verdicts("plain", tokens, prompt='{"a": 1} {"a": {"b": "')
    assert said == [False] * (len(tokens) - 1) + [True]


def test_a_sequence_that_goes_on_from_stored_tokens() -> None:
    """The hook's first call shows it several tokens at once."""
    tokenizer = tokenizer_of("plain")
    ids = torch.tensor([[*tokenizer.encode("the [ "), *tokenizer.encode('{"a": {}'), *tokenizer.encode("}")]])
    (criterion,) = BalancedJsonStop().stopping_criteria(len(tokenizer.encode("the [ ")), tokenizer)
    assert [bool(criterion(one, None)) for one in (ids[:, :-1], ids, ids)] == [False, True, True]  # pyright: ignore


def test_sequences_share_nothing() -> None:
    tokenizer, plugin = tokenizer_of("plain"), BalancedJsonStop()
    first, second = (plugin.stopping_criteria(0, tokenizer)[0] for _ in range(2))
    opened, closed = (torch.tensor([tokenizer.encode(text)]) for text in ("{", "}"))
    assert not first(opened, None)  # pyright: ignore[reportArgumentType]
    assert not second(closed, None)  # pyright: ignore[reportArgumentType]


def test_special_tokens_are_no_text() -> None:
    tokenizer = tokenizer_of("words")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert verdicts("words", [*tokenizer.encode("{"), end, *tokenizer.encode("}")]) == [False, False, True]


def test_only_objects_if_asked() -> None:
    text = 'as in [1]: {"a": [2]} x'
    plugin = BalancedJsonStop(begins="{")
    assert plugin.clean_text(text) == 'as in [1]: {"a": [2]}'
    assert BalancedJsonStop().clean_text(text) == "as in [1]"
    tokens = tokenizer_of("plain").encode(text)
    assert verdicts("plain", tokens, plugin=plugin).index(True) == text.encode().index(b"}")
    for bad in ("", "(", "{("):
        with pytest.raises(EngineError, match="balanced_json"):
            BalancedJsonStop(begins=bad)


def test_it_is_refused_where_its_hook_is_not_called() -> None:
    with pytest.raises(EngineError, match="balanced_json"):
        check_plugins([BalancedJsonStop()], backend="vllm", hooks=frozenset(), request_type="text")
    hooks = BalancedJsonStop.hooks
    check_plugins([BalancedJsonStop()], backend="hf", hooks=hooks, request_type="vlm")
