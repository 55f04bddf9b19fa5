"""The tokens by which a start proves each rule."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.engine.backends import breaking_tokens
from sluice.workers.guard.object_keys import ObjectKeys
from sluice.workers.guard.rules import GuardRules

ORDER = ("object_keys", "consecutive", "ngram", "any_period")
ANSWER = (0, 3, 1, 2)
PIECES = ((b"key", b"", b"x", b"{"), (b"k", b"ey", b"x", b""), (b"kkk", b"ey", b"xkeykey", b"kke"))
"""ANSWER has a key in one token, a key in several, and more than one key in a token."""


@st.composite
def rules(draw: st.DrawFn) -> GuardRules:
    keys = draw(st.one_of(st.none(), st.integers(1, 5)))
    config = RepeatTerminateConfig(
        enabled=True,
        min_new_tokens=draw(st.integers(0, 40)),
        max_consecutive_token_repeats=draw(st.one_of(st.none(), st.integers(0, 12))),
        ngram_size=draw(st.one_of(st.none(), st.integers(0, 9))),
        ngram_repeats=draw(st.integers(1, 4)),
        any_period=draw(st.booleans()),
        max_object_keys=keys,
    )
    pieces = draw(st.sampled_from(PIECES))
    return GuardRules(config, ObjectKeys.of(b"key", pieces, ANSWER) if keys else None)


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
        run, size = drawn.config.max_consecutive_token_repeats or 0, drawn.config.ngram_size or 0
        alone = {"ngram": size > 1 or run < 1, "any_period": size > 2}  # else the block is a run, or one of its periods
        if run != 1 or rule in ("object_keys", "consecutive"):
            assert trigger.rule == rule or not alone[rule]


@given(rules())
@settings(max_examples=100, deadline=None)
def test_no_token_fewer_than_needed_triggers(drawn: GuardRules) -> None:
    needed = drawn.tokens_needed()
    assume(needed)
    for rule in needed:
        guard = drawn.guard()
        for token in breaking_tokens(drawn, rule)[: min(needed.values()) - 1]:
            assert guard.push(token) is None
