"""The incremental guard against a re-scan of every prefix, written from the contract's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.guard.object_keys import ObjectKeys
from sluice.workers.guard.repeat import LOOK_EVERY, RepeatGuard, RepeatTrigger

THRESHOLDS = st.one_of(st.none(), st.integers(-1, 6))


@dataclass(frozen=True)
class Keys:
    """What is counted, and what the ids 0, 1, 2 write; every other id writes nothing."""

    pattern: bytes
    pieces: tuple[bytes, ...]

    @property
    def counter(self) -> ObjectKeys:
        return ObjectKeys.of(self.pattern, self.pieces)

    def count(self, tokens: Sequence[int]) -> int:
        """From left to right, none overlapping."""
        return b"".join(self.pieces[token] for token in tokens if token < len(self.pieces)).count(self.pattern)


LETTERS = st.lists(st.sampled_from((b"a", b"b", b"\xc3")), max_size=6).map(b"".join)
"""Of a small alphabet: patterns overlap themselves, and pieces begin, end and hold several of them, or are empty."""

KEYS = st.builds(Keys, LETTERS.filter(bool), st.tuples(LETTERS, LETTERS, LETTERS))
NO_KEYS = Keys(b"k", (b"", b"", b""))


@st.composite
def rules(draw: st.DrawFn) -> RepeatTerminateConfig:
    """Small thresholds, the disabling ones among them."""
    return RepeatTerminateConfig(
        enabled=True,
        min_new_tokens=draw(st.integers(0, 12)),
        max_consecutive_token_repeats=draw(THRESHOLDS),
        ngram_size=draw(THRESHOLDS),
        ngram_repeats=draw(st.integers(-1, 4)),
        any_period=draw(st.booleans()),
        max_object_keys=draw(st.one_of(st.none(), st.integers(1, 4))),
    )


@st.composite
def streams(draw: st.DrawFn) -> list[int]:
    """Runs, blocks of a near period repeated and cut, and noise, one after another; id 0 throughout."""
    vocab, tokens = draw(st.integers(1, 3)), list[int]()
    for _ in range(draw(st.integers(1, 4))):
        block = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=8))
        tokens += (block * draw(st.integers(1, 5)))[: draw(st.integers(1, 40))]
    return tokens


def trailing_run(tokens: Sequence[int]) -> int:
    """How often the last token stands at the end."""
    return next((n for n, token in enumerate(reversed(tokens)) if token != tokens[-1]), len(tokens))


def has_period(tokens: Sequence[int], period: int) -> bool:
    """Every token is equal to the one that stands `period` before it, if there is one."""
    return all(token == tokens[at] for at, token in enumerate(tokens[period:]))


def rescan(config: RepeatTerminateConfig, counted: Keys, tokens: Sequence[int]) -> RepeatTrigger | None:
    """The rule as it is written, on all generated tokens."""
    if len(tokens) < config.min_new_tokens or not tokens:
        return None
    keys, run = config.max_object_keys, config.max_consecutive_token_repeats
    if keys is not None and counted.count(tokens) >= keys:
        return RepeatTrigger("object_keys", len(tokens))
    if run is not None and run > 0 and trailing_run(tokens) >= run:
        return RepeatTrigger("consecutive", len(tokens))
    size, repeats = config.ngram_size, config.ngram_repeats
    if size is not None and size > 0 and repeats >= 2 and len(tokens) >= size * repeats:
        tail = tokens[len(tokens) - size * repeats :]
        if all(tail[at : at + size] == tail[:size] for at in range(0, len(tail), size)):
            return RepeatTrigger("ngram", len(tokens))
        looked_at = config.any_period and len(tokens) % LOOK_EVERY == 0
        if looked_at and any(has_period(tail, period) for period in range(1, size + 1)):
            return RepeatTrigger("any_period", len(tokens))
    return None


def agree(config: RepeatTerminateConfig, keys: Keys, tokens: list[int]) -> list[RepeatTrigger | None]:
    """The triggers after each token, the same from both."""
    guard = RepeatGuard(config, keys.counter)
    pushed = [guard.push(token) for token in tokens]
    assert pushed == [rescan(config, keys, tokens[: at + 1]) for at in range(len(tokens))]
    return pushed


@given(rules(), KEYS, streams())
@example(RepeatTerminateConfig(enabled=True, min_new_tokens=0, max_object_keys=2), Keys(b"aa", (b"a",) * 3), [0] * 5)
@settings(max_examples=250, deadline=None)
def test_every_prefix_triggers_as_a_rescan_says(config: RepeatTerminateConfig, keys: Keys, tokens: list[int]) -> None:
    agree(config, keys, tokens)


@given(rules(), KEYS, streams())
@settings(max_examples=80, deadline=None)
def test_a_guard_resumed_anywhere_goes_on_as_if_it_had_never_stopped(
    config: RepeatTerminateConfig, keys: Keys, tokens: list[int]
) -> None:
    whole = agree(config, keys, tokens)
    for cut in range(len(tokens) + 1):
        resumed = RepeatGuard(config, keys.counter)
        assert resumed.push_all(tokens[:cut]) == (whole[cut - 1] if cut else None)
        assert [resumed.push(token) for token in tokens[cut:]] == whole[cut:]


@given(st.integers(1, 9), st.integers(-1, 1), st.integers(2, 4), st.integers(0, 30), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_a_period_beside_the_block_length(size: int, off: int, repeats: int, least: int, lead: int) -> None:
    """A loop of distinct tokens ends by `ngram` when its period divides the block length, and else never."""
    config = RepeatTerminateConfig(
        enabled=True,
        min_new_tokens=least,
        max_consecutive_token_repeats=None,
        ngram_size=size,
        ngram_repeats=repeats,
    )
    period = max(1, size + off)
    loop = [at % period for at in range(size * repeats + least + 2 * period)]
    pushed = agree(config, NO_KEYS, [100 + at for at in range(lead)] + loop)
    fires = size % period == 0
    first = next((trigger.at_token for trigger in pushed if trigger), None)
    assert first == (max(least, lead + size * repeats) if fires else None)


@given(st.integers(1, 12), st.integers(0, 20), st.integers(0, 6), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_a_run_across_the_arming_length(run: int, least: int, lead: int, token: int) -> None:
    """The run counts from its first token; only the trigger waits for `min_new_tokens`."""
    config = RepeatTerminateConfig(
        enabled=True, min_new_tokens=least, max_consecutive_token_repeats=run, ngram_size=None
    )
    pushed = agree(config, NO_KEYS, [100 + at for at in range(lead)] + [token] * (run + least))
    first = next(trigger for trigger in pushed if trigger)
    alone = least if run == 1 else 0  # every token is a run of one: the lead triggers too
    assert first.rule == "consecutive"
    assert first.at_token == (max(alone, 1) if run == 1 else max(least, lead + run))


@given(st.sampled_from((b"aa", b"aba", b"aabaa", b"\xc3\xa9")), st.integers(1, 4), st.lists(LETTERS, max_size=30))
@settings(max_examples=100, deadline=None)
def test_keys_that_overlap_themselves_whatever_tokens_they_come_in(
    pattern: bytes, most: int, pieces: list[bytes]
) -> None:
    config = RepeatTerminateConfig(
        enabled=True, min_new_tokens=0, max_consecutive_token_repeats=None, ngram_size=None, max_object_keys=most
    )
    glued = [pattern, *[pattern[1:]] * (2 * most), *[bytes([byte]) for byte in pattern * most]]
    for chosen in (pieces, glued):  # in `glued` each border is shared by two would-be keys
        agree(config, Keys(pattern, tuple(chosen)), list(range(len(chosen))))


@given(
    st.integers(2, 40),
    st.integers(2, 4),
    st.integers(0, 300),
    st.integers(0, 50),
    st.integers(1, 50),
    st.lists(st.integers(0, 1), min_size=1, max_size=45),
)
@settings(max_examples=150, deadline=None)
def test_any_period_is_what_a_naive_look_at_the_window_finds(
    size: int, repeats: int, least: int, lead: int, cut: int, block: list[int]
) -> None:
    """A lead, a loop, a break, the loop again: blocks of two letters have many borders and near periods."""
    config = RepeatTerminateConfig(
        enabled=True,
        min_new_tokens=least,
        max_consecutive_token_repeats=None,
        ngram_size=size,
        ngram_repeats=repeats,
        any_period=True,
    )
    loop = (block * (4 * size * repeats))[: size * repeats + cut + 2 * LOOK_EVERY]
    pushed = agree(config, NO_KEYS, [at % 3 for at in range(lead)] + loop + [2] + loop)
    fired = [trigger for trigger in pushed if trigger and trigger.rule == "any_period"]
    assert all(trigger.at_token % LOOK_EVERY == 0 for trigger in fired)
    if len(block) <= size:  # the loop is long enough to be seen once, unless its beginning comes too late
        assert any(pushed) or len(loop) + lead < least + LOOK_EVERY


@given(st.integers(1, 80))
@settings(max_examples=40, deadline=None)
def test_a_vocabulary_of_one_ends_at_the_first_rule_that_is_armed(count: int) -> None:
    defaults = RepeatTerminateConfig(enabled=True, min_new_tokens=8, max_object_keys=70, ngram_size=10)
    pushed = agree(defaults, Keys(b"a", (b"a", b"", b"")), [0] * count)
    assert pushed[:19] == [None] * min(19, count)
    assert all(trigger and trigger.rule == "ngram" for trigger in pushed[19:63])
    assert all(trigger and trigger.rule == "consecutive" for trigger in pushed[63:69])
    assert all(trigger and trigger.rule == "object_keys" for trigger in pushed[69:])


@given(streams(), st.sampled_from((None, 0, -1)), st.sampled_from(((None, 2), (0, 2), (-3, 2), (1, 1), (1, 0))))
@settings(max_examples=80, deadline=None)
def test_disabled_rules_never_trigger(tokens: list[int], run: int | None, ngram: tuple[int | None, int]) -> None:
    config = RepeatTerminateConfig(
        enabled=True,
        min_new_tokens=0,
        max_consecutive_token_repeats=run,
        ngram_size=ngram[0],
        ngram_repeats=ngram[1],
        max_object_keys=None,
    )
    assert agree(config, NO_KEYS, tokens) == [None] * len(tokens)
