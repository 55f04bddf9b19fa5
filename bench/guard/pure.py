"""Nanoseconds a token of the rule alone, beside the naive re-scan and vLLM's `repetition_detection`.

- All see the same tokens one by one, in turns within a round, with the default thresholds; a figure is the median of
  the rounds. `any_period` and `object_keys` are our rule with that key more, off in the others.
- All are silent below `min_new_tokens`, and none may trigger: the whole stream is looked at.
- vLLM's check has one pattern range and one count, so our two rules are two calls: (min 1, max 1, count 64) and
  (min 64, max 64, count 2). `upstream_any_period` is what its users would set: (min 1, max 64, count 3), which also
  sees periods that do not divide 64, and ends "a a a". It is given plain lists; vLLM gives it a wrapper of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec import structs

from sluice.bench.guard.naive import naive_rule
from sluice.bench.guard.plan import ANY_PERIOD, DEFAULTS
from sluice.bench.guard.streams import VOCABULARY, random_stream, text_stream
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import SluiceError
from sluice.workers.guard.object_keys import ObjectKeys
from sluice.workers.guard.repeat import OFF, RepeatGuard

_KEYS = structs.replace(DEFAULTS, max_object_keys=OFF)

Rule = Callable[[], Callable[[int], Any]]
"""Makes what takes the next token of a new sequence, and says something true if it triggers."""


def ns_per_token(rounds: int, length: int, vllm: bool) -> dict[str, Any]:
    """The fields of this part; upstream's are None where vLLM is not measured."""
    streams = {"random": random_stream(length, 0), "text": text_stream(length, 0)}
    ours = {"": _ours(DEFAULTS), "any_period_": _ours(ANY_PERIOD), "object_keys_": _ours(_KEYS, _key_table())}
    rules = {**ours, "naive_": _naive, **(_upstream() if vllm else {})}
    taken = {name: {stream: list[float]() for stream in streams} for name in rules}
    for number in range(rounds + 1):
        for stream, tokens in streams.items():
            for name, rule in rules.items():
                found = _time(name, rule, tokens)
                if number:  # the first one warms up
                    taken[name][stream].append(found)
    fields: dict[str, Any] = dict.fromkeys(("upstream_ns_per_token", "upstream_any_period_ns_per_token"))
    for name, by_stream in taken.items():
        fields[f"{name}ns_per_token"] = _mean({stream: median(each) for stream, each in by_stream.items()})
    return {**fields, "ns_by_stream": {f"{name}ns_per_token": _medians(each) for name, each in taken.items()}}


def _time(name: str, rule: Rule, tokens: Sequence[int]) -> float:
    take = rule()
    triggers = 0
    began = time.perf_counter_ns()
    for token in tokens:
        if take(token):
            triggers += 1
    taken = time.perf_counter_ns() - began
    if triggers and name != "upstream_any_period_":
        raise SluiceError(f"{name or 'the guard'} triggered {triggers} times on a stream that has no loop")
    return taken / len(tokens)


def _ours(config: RepeatTerminateConfig, keys: ObjectKeys | None = None) -> Rule:
    return lambda: RepeatGuard(config, keys).push


def _key_table() -> ObjectKeys:
    """Every sixteenth id writes a part of the key, more often than any tokenizer's."""
    key = DEFAULTS.object_key_prefix.encode()
    parts = [key[: 1 + at] for at in range(len(key))] + [key[at:] for at in range(1, len(key))]
    return ObjectKeys.of(key, [b" word" if at % 16 else parts[at // 16 % len(parts)] for at in range(VOCABULARY)])


def _naive() -> Callable[[int], Any]:
    seen: list[int] = []

    def take(token: int) -> Any:
        seen.append(token)
        return naive_rule(seen, DEFAULTS)

    return take


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


def _medians(by_stream: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {stream: median(each) for stream, each in by_stream.items()}


def _mean(by_stream: Mapping[str, float]) -> float:
    return sum(by_stream.values()) / len(by_stream)
