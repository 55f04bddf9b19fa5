"""The tokens by which a start proves each rule."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.config.types import RepeatTerminateConfig
from workers.guard.probe import breaking_tokens
from workers.guard.rules import GuardRules

ORDER = ("object_keys", "consecutive", "ngram")


@st.composite
def rules(draw: st.DrawFn) -> GuardRules:
    keys = draw(st.one_of(st.none(), st.integers(1, 5)))
    config = RepeatTerminateConfig(
        enabled=True,
        min_new_tokens=draw(st.integers(0, 40)),
        max_consecutive_token_repeats=draw(st.one_of(st.none(), st.integers(0, 12))),
        ngram_size=draw(st.one_of(st.none(), st.integers(0, 9))),
        ngram_repeats=draw(st.integers(1, 4)),
        max_object_keys=keys,
    )
    pattern = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    return GuardRules(config, tuple(pattern) if keys else ())


@given(rules())
@settings(max_examples=250, deadline=None)
def test_every_rule_that_is_on_is_broken_by_its_tokens(drawn: GuardRules) -> None:
    """By the rule itself, unless one that comes before it in the order must trigger too."""
    needed = drawn.tokens_needed()
    assume(needed)
    for rule, least in needed.items():
        tokens = breaking_tokens(drawn, rule)
        trigger = drawn.guard().push_all(tokens)
        assert trigger is not None
        assert trigger.at_token == len(tokens) >= least
        assert ORDER.index(trigger.rule) <= ORDER.index(rule)
        run = drawn.config.max_consecutive_token_repeats
        if rule != "ngram" or not run or run < 0 or (run > 1 and drawn.config.ngram_size != 1):
            assert trigger.rule == rule


@given(rules())
@settings(max_examples=100, deadline=None)
def test_no_token_fewer_than_needed_triggers(drawn: GuardRules) -> None:
    needed = drawn.tokens_needed()
    assume(needed)
    for rule in needed:
        guard = drawn.guard()
        for token in breaking_tokens(drawn, rule)[: min(needed.values()) - 1]:
            assert guard.push(token) is None
