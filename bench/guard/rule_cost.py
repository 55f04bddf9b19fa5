"""Nanoseconds per token of the rule alone, against a naive re-scan and vLLM's `repetition_detection`.

- All see the same tokens one by one, alternating within a round, with the default thresholds; figures are medians of
  the rounds. `any_period` and `object_keys` are our rule with that key added, off in the others.
- All are silent below `min_new_tokens`, and none may trigger: each reads the whole stream.
- vLLM's check has one pattern range and one count, so our two rules are two calls: (min 1, max 1, count 64) and
  (min 64, max 64, count 2). `upstream_any_period` is what its users would set: (min 1, max 64, count 3), which also
  detects periods that don't divide 64, and ends "a a a". It gets plain lists; vLLM passes a wrapper of one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from msgspec import structs

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import SluiceError
from sluice.workers.guard.object_keys import ObjectKeys
from sluice.workers.guard.repeat import OFF, RepeatGuard

DEFAULTS = RepeatTerminateConfig(enabled=True)  # of a run which only switches the guard on
ANY_PERIOD = structs.replace(DEFAULTS, any_period=True)
_KEYS = structs.replace(DEFAULTS, max_object_keys=OFF)
_VOCABULARY, _WORDS = 150_000, 5_000
_RUN, _PHRASE = (2, 40), (4, 24)  # tokens

Rule = Callable[[], Callable[[int], Any]]
"""Makes what takes the next token of a new sequence, and says something true if it triggers."""


def ns_per_token(rounds: int, length: int, vllm: bool) -> dict[str, Any]:
    """The fields of this part; upstream's are None if vLLM isn't measured."""
    streams = {"random": _random_stream(length, 0), "text": _text_stream(length, 0)}
    ours = {"": _ours(DEFAULTS), "any_period_": _ours(ANY_PERIOD), "object_keys_": _ours(_KEYS, _key_table())}
    rules = {**ours, "naive_": _naive, **(_upstream() if vllm else {})}
    taken = {name: {stream: list[float]() for stream in streams} for name in rules}
    for number in range(rounds + 1):
        for stream, tokens in streams.items():
            for name, rule in rules.items():
                found = _time(name, rule, tokens)
                if number:  # the first one warms up
                    taken[name][stream].append(found)
    by_stream = {
        f"{name}ns_per_token": {stream: median(each) for stream, each in by.items()} for name, by in taken.items()
    }
    fields: dict[str, Any] = dict.fromkeys(("upstream_ns_per_token", "upstream_any_period_ns_per_token"))
    return {**fields, **{name: fmean(by.values()) for name, by in by_stream.items()}, "ns_by_stream": by_stream}


def _time(name: str, rule: Rule, tokens: Sequence[int]) -> float:
    take, triggers = rule(), 0
    began = time.perf_counter_ns()
    for token in tokens:
        if take(token):
            triggers += 1
    taken = time.perf_counter_ns() - began
    if triggers and name != "upstream_any_period_":
        raise SluiceError(f"{name or 'the guard'} triggered {triggers} times on a stream without a loop")
    return taken / len(tokens)


def _ours(config: RepeatTerminateConfig, keys: ObjectKeys | None = None) -> Rule:
    return lambda: RepeatGuard(config, keys).push


def _key_table() -> ObjectKeys:
    """Every sixteenth id writes a part of the key, more often than any tokenizer's."""
    key = DEFAULTS.object_key_prefix.encode()
    parts = [key[: 1 + at] for at in range(len(key))] + [key[at:] for at in range(1, len(key))]
    return ObjectKeys.of(key, [b" word" if at % 16 else parts[at // 16 % len(parts)] for at in range(_VOCABULARY)])


def _naive() -> Callable[[int], Any]:
    seen: list[int] = []

    def take(token: int) -> Any:
        seen.append(token)
        return naive_rule(seen, DEFAULTS)

    return take


def naive_rule(tokens: Sequence[int], config: RepeatTerminateConfig) -> str | None:
    """`consecutive` or `ngram` if these generated tokens should end here, else None.

    The guard's rules without state: the tail is scanned again at every token. The object-key rule is left out; its
    re-scan would be linear in the sequence.
    """
    end = len(tokens)
    if not tokens or end < config.min_new_tokens:
        return None
    most = config.max_consecutive_token_repeats
    if most is not None and most > 0 and _trailing_run(tokens) >= most:
        return "consecutive"
    size, repeats = config.ngram_size, config.ngram_repeats
    if size is None or size <= 0 or repeats < 2 or end < size * repeats:
        return None
    block = tokens[end - size :]
    same = all(tokens[end - (back + 1) * size : end - back * size] == block for back in range(1, repeats))
    return "ngram" if same else None


def _trailing_run(tokens: Sequence[int]) -> int:
    """How often the last token is repeated at the end."""
    last, length = tokens[-1], 1
    while length < len(tokens) and tokens[-1 - length] == last:
        length += 1
    return length


def _upstream() -> dict[str, Rule]:
    from vllm.sampling_params import RepetitionDetectionParams as Params
    from vllm.v1.core.sched.utils import check_sequence_repetition

    size, run = DEFAULTS.ngram_size or 0, DEFAULTS.max_consecutive_token_repeats or 0

    def rule(first: Params, second: Params | None = None) -> Rule:
        def begin() -> Callable[[int], Any]:
            seen: list[int] = []

            def take(token: int) -> Any:
                seen.append(token)
                if len(seen) < DEFAULTS.min_new_tokens:
                    return False
                found = check_sequence_repetition(seen, first)
                return found or (second is not None and check_sequence_repetition(seen, second))

            return take

        return begin

    return {
        "upstream_": rule(Params(1, 1, run), Params(size, size, DEFAULTS.ngram_repeats)),
        "upstream_any_period_": rule(Params(size, 1, 3)),
    }


def _random_stream(length: int, seed: int) -> list[int]:
    """Uniformly random ids."""
    chance = random.Random(seed)
    return [chance.randrange(_VOCABULARY) for _ in range(length)]


def _text_stream(length: int, seed: int) -> list[int]:
    """Ids with the frequencies of words (1/rank), with runs of one id (spaces, dashes) and repeated phrases."""
    chance, tokens = random.Random(seed), list[int]()
    ranks = range(1, _WORDS)
    weights = [1 / rank for rank in ranks]
    while len(tokens) < length:
        tokens += chance.choices(ranks, weights, k=60)
        tokens += [tokens[-1]] * chance.randint(*_RUN)
        tokens += tokens[-chance.randint(*_PHRASE) :]
    return tokens[:length]
