"""Tokens that the guard saves of the loop-prone workload, beside an oracle's; greedy, in our own engine.

What the guard does in the engine must be what the rule says of the known continuation, or nothing is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.guard.engines import engine
from sluice.bench.guard.loop_model import Chains, ensure_model
from sluice.bench.guard.plan import ANY_PERIOD, DEFAULTS, HOME, Plan
from sluice.bench.guard.work import Done, Work
from sluice.bench.guard.workload import Start, guard_keeps, oracle_keeps, starts
from sluice.bench.report import say
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import SluiceError

_MAX_BATCH = 64
_OTHER_SIZES = (48, 60, 120)  # for comparison: every period that divides the size is seen


async def saved(plan: Plan, home: Path) -> dict[str, Any]:
    """The fields of this part."""
    chains = Chains.make()
    work = starts(chains, plan.sequences)
    full = [chains.continuation(start.token, plan.longest) for start in work]
    oracle = [_oracle(start, whole) for start, whole in zip(work, full, strict=True)]
    ask = Work([[start.token] for start in work], plan.longest)
    shares: dict[str, dict[str, Any]] = {}
    for name, thresholds in (("", DEFAULTS), ("any_period", ANY_PERIOD)):
        async with engine("hf", ensure_model(HOME).resolve(), _MAX_BATCH, home, thresholds) as running:
            done = await running.decode(ask)
        _check(done, full, chains.end, thresholds)
        kept = [len(whole) if at is None else at for at, whole in zip(done.at_token, full, strict=True)]
        found = shares[name] = fields(work, full, kept, oracle)
        say(
            f"{name or 'the rule'} saved {found['saved_share']:.3f} of what an oracle saves, by period "
            f"{found['saved_share_by_period']}"
        )
    any_period = shares["any_period"]
    armed = [min(len(whole), max(best, DEFAULTS.min_new_tokens)) for whole, best in zip(full, oracle, strict=True)]
    return {
        **shares[""],
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
    for start, whole, mine, best in zip(work, full, kept, oracle, strict=True):
        guard, most = by_kind.get(kind := _kind(start.period), (0, 0))
        by_kind[kind] = guard + len(whole) - mine, most + len(whole) - best
    by_kind.pop("none", None)
    ended = {True: 0, False: 0}
    for start, whole, mine in zip(work, full, kept, strict=True):
        ended[start.period > 0] += mine < len(whole)
    looping = sum(start.period > 0 for start in work)
    return {
        "saved_share": _share(sum(guard for guard, _ in by_kind.values()), sum(most for _, most in by_kind.values())),
        "saved_share_by_period": {kind: _share(*pair) for kind, pair in by_kind.items()},
        "tail_tokens": {
            "without": sum(map(len, full)),
            "saved_by_guard": sum(guard for guard, _ in by_kind.values()),
            "saved_by_oracle": sum(most for _, most in by_kind.values()),
        },
        "ended": {"looping": ended[True], "of_looping": looping, "healthy": ended[False]},
    }


def _kind(period: int) -> str:
    """By what the guard can see of it: a run of one token, a block that is a whole number of periods, or neither."""
    if period < 2:
        return "one_token" if period else "none"
    return "other" if (DEFAULTS.ngram_size or 0) % period else f"divides_{DEFAULTS.ngram_size}"


def _share(guard: int, most: int) -> float:
    return guard / most if most else 0.0


def _oracle(start: Start, whole: Sequence[int]) -> int:
    return oracle_keeps(whole, DEFAULTS.ngram_size or 0) if start.period else len(whole)


def _by_size(full: Sequence[Sequence[int]], oracle: Sequence[int]) -> Mapping[str, float]:
    """The saved share that the rule alone would have with other block lengths, against the same oracle."""
    found: dict[str, float] = {}
    most = sum(len(whole) - best for whole, best in zip(full, oracle, strict=True))
    for size in sorted({DEFAULTS.ngram_size or 0, *_OTHER_SIZES}):
        config = msgspec.structs.replace(DEFAULTS, ngram_size=size)
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
