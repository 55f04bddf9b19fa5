"""Thresholds on their way from the configuration to a guard in another process."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.types import RepeatTerminateConfig
from pipeline.errors import ConfigError
from tests.tiny_models import build_tokenizer
from workers.guard.repeat import RepeatTrigger
from workers.guard.rules import GuardRules

UNLIKE_ANY_DEFAULT = RepeatTerminateConfig(
    enabled=True,
    min_new_tokens=7,
    max_consecutive_token_repeats=None,
    ngram_size=5,
    ngram_repeats=3,
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
        max_object_keys=st.one_of(st.none(), st.integers(1, 99)),
        object_key_prefix=st.text(),
    ),
    st.lists(st.integers(0, 2**31)),
)
@settings(max_examples=60, deadline=None)
def test_the_full_subtree_comes_through_json(config: RepeatTerminateConfig, pattern: list[int]) -> None:
    rules = GuardRules(config, tuple(pattern))
    plain = json.loads(json.dumps(rules.plain()))
    assert set(plain["config"]) == {field.name for field in msgspec.structs.fields(RepeatTerminateConfig)}
    assert GuardRules.from_plain(plain) == rules


def test_no_value_is_left_to_a_default() -> None:
    defaults, plain = msgspec.to_builtins(RepeatTerminateConfig()), GuardRules(UNLIKE_ANY_DEFAULT, (1,)).plain()
    assert all(plain["config"][key] != value for key, value in defaults.items())


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"config": {"enabled": True}},
        {"key_pattern": []},
        {"config": {"min_tokens": 3}, "key_pattern": []},
        {"config": {"min_new_tokens": "3"}, "key_pattern": []},
        {"config": None, "key_pattern": []},
        {"config": {}, "key_pattern": None},
        {"config": {}, "key_pattern": ["a"]},
        {"config": {}, "key_pattern": [], "more": 1},
    ],
)
def test_anything_else_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        GuardRules.from_plain(plain)


def test_the_key_pattern_is_the_tokens_of_the_text_alone() -> None:
    tokenizer: Any = build_tokenizer()
    rules = GuardRules.of(RepeatTerminateConfig(max_object_keys=2), tokenizer)
    assert tokenizer.decode(list(rules.key_pattern)) == '"object_'
    assert GuardRules.of(RepeatTerminateConfig(), tokenizer).key_pattern == ()


def test_a_text_without_tokens_cannot_be_counted() -> None:
    with pytest.raises(ConfigError, match=r"object_key_prefix '' has no tokens.*max_object_keys"):
        GuardRules.of(RepeatTerminateConfig(max_object_keys=1, object_key_prefix=""), build_tokenizer())


def test_an_engine_without_an_end_cannot_be_guarded() -> None:
    tokenizer = build_tokenizer()
    assert GuardRules.for_engine(RepeatTerminateConfig(), tokenizer, [], "m") is None
    assert GuardRules.for_engine(RepeatTerminateConfig(enabled=True), tokenizer, [0], "m") is not None
    with pytest.raises(ConfigError, match=r"^m: .*end-of-sequence.*generation_config\.json"):
        GuardRules.for_engine(RepeatTerminateConfig(enabled=True), tokenizer, [], "m")


def test_tokens_needed_names_the_rules_that_are_on() -> None:
    needed = GuardRules(UNLIKE_ANY_DEFAULT, (1, 2)).tokens_needed()
    assert needed == {"object_keys": 22, "ngram": 15}
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
