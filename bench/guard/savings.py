"""Tokens that the guard saves of a workload of which half loops, beside an oracle's; greedy, in our own engine.

- Loops begin after 0 to 256 generated tokens, every period as often as the others of `sluice.bench.models.PERIODS`.
- The oracle ends a looping sequence at the first token from which the rest is periodic for good, with a period of at
  most `ngram_size`; it does nothing else. A sequence that ends by itself is none of its business.
- What the guard does in the engine must be what the rule says of the known continuation, or nothing is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from sluice.bench.guard.engine import Done, Work, engine
from sluice.bench.guard.rule_cost import ANY_PERIOD, DEFAULTS
from sluice.bench.harness import HOME, say
from sluice.bench.models import HEALTHY, LEAD, Chains, looping_model
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import SluiceError
from sluice.workers.guard.repeat import RepeatGuard

_MAX_BATCH = 64
_OTHER_SIZES = (48, 60, 120)  # for comparison: every period that divides the size is seen
_LEAD_STRIDE, _HEALTHY_STRIDE = 97, 131  # coprime to the spans, so that neighbours differ much
_SIZE = DEFAULTS.ngram_size or 0


@dataclass(frozen=True)
class Start:
    """One sequence: the token that is its prompt, and the period of its loop, 0 for none."""

    token: int
    period: int

    @property
    def kind(self) -> str:
        """By what the guard sees of it: a run of one token, a block that is a whole number of periods, or neither."""
        if self.period < 2:
            return "one_token" if self.period else "none"
        return "other" if _SIZE % self.period else f"divides_{_SIZE}"


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


async def saved(sequences: int, longest: int, home: Path) -> dict[str, Any]:
    """The fields of this part; `longest` new tokens of each."""
    chains = Chains.make()
    work = starts(chains, sequences)
    full = [chains.continuation(start.token, longest) for start in work]
    oracle = [
        oracle_keeps(whole, _SIZE) if start.period else len(whole) for start, whole in zip(work, full, strict=True)
    ]
    ask = Work([[start.token] for start in work], longest)
    shares: dict[str, dict[str, Any]] = {}
    for name, thresholds in (("the rule", DEFAULTS), ("any_period", ANY_PERIOD)):
        async with engine("hf", looping_model(HOME), _MAX_BATCH, home, thresholds) as running:
            done = await running.decode(ask)
        _check(done, full, chains.end, thresholds)
        kept = [len(whole) if at is None else at for at, whole in zip(done.at_token, full, strict=True)]
        found = shares[name] = fields(work, full, kept, oracle)
        share, by_period = found["saved_share"], found["saved_share_by_period"]
        say(f"{name} saved {share:.3f} of what an oracle saves, by period {by_period}")
    any_period = shares["any_period"]
    armed = [min(len(whole), max(best, DEFAULTS.min_new_tokens)) for whole, best in zip(full, oracle, strict=True)]
    return {
        **shares["the rule"],
        "saved_share_any_period": any_period["saved_share"],
        "saved_share_any_period_by_period": any_period["saved_share_by_period"],
        "ended_any_period": any_period["ended"],
        "saved_share_ceiling": fields(work, full, armed, oracle)["saved_share"],
        "saved_share_by_ngram_size": _by_size(full, oracle),
    }


def fields(
    work: Sequence[Start], full: Sequence[Sequence[int]], kept: Sequence[int], oracle: Sequence[int]
) -> dict[str, Any]:
    """`full`: tokens without a guard; `kept`, `oracle`: how many of them are left by the guard and by the oracle."""
    by_kind: dict[str, tuple[int, int]] = {}
    ended = {True: 0, False: 0}
    for start, whole, mine, best in zip(work, full, kept, oracle, strict=True):
        guard, most = by_kind.get(start.kind, (0, 0))
        by_kind[start.kind] = guard + len(whole) - mine, most + len(whole) - best
        ended[start.period > 0] += mine < len(whole)
    by_kind.pop("none", None)
    guard, most = (sum(pair[side] for pair in by_kind.values()) for side in (0, 1))
    return {
        "saved_share": _share(guard, most),
        "saved_share_by_period": {kind: _share(*pair) for kind, pair in by_kind.items()},
        "tail_tokens": {"without": sum(map(len, full)), "saved_by_guard": guard, "saved_by_oracle": most},
        "ended": {
            "looping": ended[True],
            "of_looping": sum(start.period > 0 for start in work),
            "healthy": ended[False],
        },
    }


def _share(guard: int, most: int) -> float:
    return guard / most if most else 0.0


def _by_size(full: Sequence[Sequence[int]], oracle: Sequence[int]) -> Mapping[str, float]:
    """The saved share that the rule alone would have with other block lengths, against the same oracle."""
    found: dict[str, float] = {}
    most = sum(len(whole) - best for whole, best in zip(full, oracle, strict=True))
    for size in sorted({_SIZE, *_OTHER_SIZES}):
        config = structs.replace(DEFAULTS, ngram_size=size)
        found[str(size)] = _share(sum(len(whole) - guard_keeps(whole, config) for whole in full), most)
    return found


def _check(done: Done, full: Sequence[Sequence[int]], end: int, thresholds: RepeatTerminateConfig) -> None:
    """Raises SluiceError unless the engine did what is written in the model and in the rule."""
    for tokens, at, whole in zip(done.tokens, done.at_token, full, strict=True):
        keeps = guard_keeps(whole, thresholds)
        wanted = [*whole[:keeps], end] if at is not None else list(whole)
        if tokens != wanted or (at is None) != (keeps == len(whole)):
            raise SluiceError(
                f"a sequence of {len(tokens)} tokens, ended by the guard at {at}: the rule says {keeps} of {len(whole)}"
            )
