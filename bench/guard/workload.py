"""A workload of which half loops, and what an oracle that knows the future would save of it.

- Loops begin after 0 to 256 generated tokens, every period as often as the others of `loop_model.PERIODS`.
- The oracle ends a looping sequence at the first token from which the rest is periodic for good, with a period of at
  most `ngram_size`; it does nothing else. A sequence that ends by itself is none of its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.bench.guard.loop_model import HEALTHY, LEAD, Chains
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.workers.guard.repeat import RepeatGuard

_LEAD_STRIDE, _HEALTHY_STRIDE = 97, 131  # coprime to the spans, so that neighbours differ much


@dataclass(frozen=True)
class Start:
    """One sequence: the token that is its prompt, and the period of its loop, 0 for none."""

    token: int
    period: int


def starts(chains: Chains, count: int) -> list[Start]:
    """Looping and healthy ones in turns."""
    found: list[Start] = []
    for index in range(count):
        at = index // 2
        if index % 2:
            found.append(Start(chains.healthy[at * _HEALTHY_STRIDE % HEALTHY], 0))
        else:
            lead, loop = chains.loops[at % len(chains.loops)]
            found.append(Start(lead[LEAD - 1 - at * _LEAD_STRIDE % LEAD], len(loop)))
    return found


def oracle_keeps(tokens: Sequence[int], longest_period: int) -> int:
    """Tokens before the first one from which all that follows is periodic, at least twice the period long.

    `tokens` are all that the sequence would have; len(tokens) where there is no such place.
    """
    keeps = len(tokens)
    for period in range(1, longest_period + 1):
        begin = len(tokens) - period
        while begin > 0 and tokens[begin - 1] == tokens[begin - 1 + period]:
            begin -= 1
        if begin + 2 * period <= len(tokens):
            keeps = min(keeps, begin)
    return keeps


def guard_keeps(tokens: Sequence[int], config: RepeatTerminateConfig) -> int:
    """Tokens before the one that the guard forces; len(tokens) where it does not, or not before the last."""
    guard = RepeatGuard(config)
    for token in tokens[:-1]:
        if guard.push(token) is not None:
            return guard.length
    return len(tokens)
