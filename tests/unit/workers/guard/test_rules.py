"""Thresholds on their way from the configuration to a guard in another process."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError
from sluice.workers.guard.object_keys import ObjectKeys
from sluice.workers.guard.repeat import RepeatTrigger
from sluice.workers.guard.rules import GuardRules
from tests.tiny_models import build_tokenizer

UNLIKE_ANY_DEFAULT = RepeatTerminateConfig(
    enabled=True,
    min_new_tokens=7,
    max_consecutive_token_repeats=None,
    ngram_size=5,
    ngram_repeats=3,
    any_period=True,
    max_object_keys=11,
    object_key_prefix="<box>",
)
THRESHOLDS = st.one_of(st.none(), st.integers(-2, 300))


@given(
    st.builds(
        RepeatTerminateConfig,
        enabled=st.booleans(),
        min_new_tokens=st.integers(0, 999),
        max_consecutive_token_repeats=THRESHOLDS,
        ngram_size=THRESHOLDS,
        ngram_repeats=st.integers(-2, 9),
        any_period=st.booleans(),
        max_object_keys=st.one_of(st.none(), st.integers(1, 99)),
        object_key_prefix=st.text(),
    ),
    st.binary(min_size=1, max_size=6),
    st.lists(st.binary(max_size=4), max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_the_full_subtree_comes_through_json(
    config: RepeatTerminateConfig, pattern: bytes, pieces: list[bytes]
) -> None:
    rules = GuardRules(config, ObjectKeys.of(pattern, pieces, answer=range(len(pieces))))
    plain = json.loads(json.dumps(rules.plain()))
    assert set(plain["config"]) == {field.name for field in msgspec.structs.fields(RepeatTerminateConfig)}
    assert GuardRules.from_plain(plain) == rules


def test_no_value_is_left_to_a_default() -> None:
    defaults, plain = msgspec.to_builtins(RepeatTerminateConfig()), GuardRules(UNLIKE_ANY_DEFAULT).plain()
    assert all(plain["config"][key] != value for key, value in defaults.items())


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"config": {"enabled": True}},
        {"keys": None},
        {"config": {"min_tokens": 3}, "keys": None},
        {"config": {"min_new_tokens": "3"}, "keys": None},
        {"config": None, "keys": None},
        {"config": {}, "keys": []},
        {"config": {}, "keys": {"moves": [], "known": 1}},
        {"config": {}, "keys": {"moves": [[[[0]], [3]]], "known": 1, "answer": []}},
        {"config": {}, "keys": None, "more": 1},
    ],
)
def test_anything_else_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        GuardRules.from_plain(plain)


def test_an_engine_without_an_end_cannot_be_guarded() -> None:
    tokenizer = build_tokenizer()
    assert GuardRules.for_engine(RepeatTerminateConfig(), tokenizer, [], "m") is None
    assert GuardRules.for_engine(RepeatTerminateConfig(enabled=True), tokenizer, [0], "m") is not None
    with pytest.raises(ConfigError, match=r"^m: .*end-of-sequence.*generation_config\.json"):
        GuardRules.for_engine(RepeatTerminateConfig(enabled=True), tokenizer, [], "m")


def test_tokens_needed_names_the_rules_that_are_on() -> None:
    pairs = ObjectKeys.of(b"a", [b"", b"aa", b"ba"])  # eleven keys take six tokens, and nothing triggers before seven
    needed = GuardRules(UNLIKE_ANY_DEFAULT, pairs).tokens_needed()
    assert needed == {"object_keys": 7, "ngram": 15, "any_period": 16}
    single = ObjectKeys.of(b"ab", [b"a", b"b"])
    assert GuardRules(UNLIKE_ANY_DEFAULT, single).tokens_needed()["object_keys"] == 11
    config = RepeatTerminateConfig(min_new_tokens=20, max_consecutive_token_repeats=3, ngram_size=2, ngram_repeats=1)
    assert GuardRules(config).tokens_needed() == {"consecutive": 20}
    for off in (None, 0, -1):
        config = RepeatTerminateConfig(max_consecutive_token_repeats=off, ngram_size=off)
        assert GuardRules(config).tokens_needed() == {}


def test_guards_of_one_engine_share_nothing_but_rules() -> None:
    rules = GuardRules(RepeatTerminateConfig(min_new_tokens=1, max_consecutive_token_repeats=2))
    first, second = rules.guard(), rules.guard()
    assert first.push_all([5, 5]) == RepeatTrigger("consecutive", 2)
    assert second.push(5) is None
    assert (first.length, second.length) == (2, 1)
