"""All sides in one run, round by round, and the fields of the JSON object.

- While one side decodes, the processes of the others are paused (SIGSTOP). Start-up seconds run from the start of a
  process to its first decoded token, imports included.
- Greedy float32 tokens must be the same on every side, near-ties apart; otherwise the run fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sluice.bench.engine.sides import LONGEST, SHORTEST, Sample, asks, serve_side
from sluice.bench.harness import (
    HOME,
    at_least_one,
    own_directory,
    play,
    ratios,
    run_interruptible,
    say,
    spread,
    why_no_vllm,
)  # fmt: skip
from sluice.bench.models import endless_model
from sluice.bench.processes import START_S, Fleet, engine_environment
from sluice.pipeline.errors import ConfigError, SluiceError

EQUAL_FLOOR = 0.9
PEERS = {"padded": "hf", "continuous": "hf", "vllm_bare": "vllm"}
"""Each peer, and the side of ours that it is compared with."""

_RATIO_NAMES = {"padded": "hf_vs_padded", "continuous": "hf_vs_continuous", "vllm_bare": "vllm_efficiency"}
Round = Mapping[str, Sample]
"""The samples of all sides over the same sequences."""


@dataclass(frozen=True)
class Plan:
    """`rounds` holds the rounds of each count of sequences, in ascending order of the counts."""

    rounds: dict[int, int]
    threads: int
    longest: int  # new tokens of the longest sequence
    model: Path
    why_no_vllm: str | None  # None: the sides of vLLM run

    @property
    def sides(self) -> tuple[str, ...]:
        """In the order of the first round."""
        return ("hf", "padded", "continuous", *(() if self.why_no_vllm else ("vllm", "vllm_bare")))

    @classmethod
    def of(
        cls, *, counts: tuple[int, ...], rounds: int | None, threads: int, longest: int, vllm: bool, quick: bool
    ) -> Plan:
        """Checked; the model is made when it is not there yet. Raises ConfigError."""
        at_least_one(counts=counts, rounds=rounds, threads=threads)
        if not SHORTEST <= longest <= LONGEST:
            raise ConfigError(f"--longest {longest} is outside {SHORTEST}..{LONGEST}, which the context is made for")
        # many sequences have fewer rounds: each is longer, and steadier
        by_count = {count: rounds or (3 if count <= 64 else 1) for count in sorted(set(counts))}
        if quick:
            by_count, longest = dict.fromkeys(by_count, 1), min(longest, 64)
        return cls(by_count, threads, longest, endless_model(HOME), why_no_vllm(vllm))


def compare(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `hf_vs_padded`, `hf_vs_continuous`, `vllm_efficiency`: our rate over the peer's, by count of sequences, null where
    the peer did not run. `by_cpu`: the same by processor time. `tok_s`: useful tokens a second of each side.
    `peak_mb`: most memory of the side's processes (on CUDA: of the allocator). `startup_s`: from the start of the
    process to its first token.
    """
    with own_directory() as home:
        return run_interruptible(_run(plan, home))


async def _run(plan: Plan, home: Path) -> dict[str, Any]:
    fleets, startup_s = dict[str, Fleet](), dict[str, float]()
    async with contextlib.AsyncExitStack() as scope:
        for side in plan.sides:
            fleets[side] = await scope.enter_async_context(Fleet(side, home))
            startup_s[side] = await _start(plan, side, fleets[side])
            say(f"{side} started in {startup_s[side]:.1f} s")
        rounds = {count: await _rounds(plan, fleets, count) for count in plan.rounds}
    return {**fields(plan, rounds), "startup_s": startup_s}


async def _start(plan: Plan, side: str, fleet: Fleet) -> float:
    env = {**engine_environment(plan.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    started = time.perf_counter()
    await fleet.start_child(serve_side, [side, str(plan.model), plan.threads, max(plan.rounds)], env)
    await fleet.receive(dict, START_S)
    seconds = time.perf_counter() - started
    fleet.pause()
    return seconds


async def _rounds(plan: Plan, fleets: Mapping[str, Fleet], count: int) -> list[dict[str, Sample]]:
    async def one(side: str, number: int) -> Sample:
        fleets[side].resume()
        (sample,) = await fleets[side].ask((number, count, plan.longest), Sample)
        fleets[side].pause()
        sample.check(side, asks(number, count, longest=plan.longest))
        say(f"{count} sequences, round {number + 1}/{plan.rounds[count]}: {side} {sample.tok_s:.0f} tok/s")
        return sample

    return await play(plan.rounds[count], plan.sides, one)


def fields(plan: Plan, rounds: Mapping[int, Sequence[Round]]) -> dict[str, Any]:
    """What the rounds come to; raises SluiceError where the sides did not decode the same."""
    peers = {_RATIO_NAMES[peer]: (ours, peer) for peer, ours in PEERS.items() if peer in plan.sides}
    every = [each for of_count in rounds.values() for each in of_count]
    equal = {peer: tokens_equal(every, ours, peer) for ours, peer in peers.values()}
    check_equal(equal, EQUAL_FLOOR)
    rates = {side: _by_count(rounds, lambda each, side=side: [one[side].tok_s for one in each]) for side in plan.sides}
    by_rate = {
        name: _by_count(rounds, lambda each, a=ours, b=peer: ratios(each, a, b, lambda sample: sample.tok_s))
        for name, (ours, peer) in peers.items()
    }
    by_cpu = {  # steadier than wall time on a busy machine
        name: _by_count(rounds, lambda each, a=ours, b=peer: ratios(each, b, a, lambda sample: sample.cpu_s))
        for name, (ours, peer) in peers.items()
    }
    return {
        **{name: _medians(by_rate[name]) if name in by_rate else None for name in _RATIO_NAMES.values()},
        "by_cpu": {name: _medians(by) for name, by in by_cpu.items()},
        "tok_s": {side: _medians(by) for side, by in rates.items()},
        "spread": {
            name: {count: _spread(values) for count, values in by.items()} for name, by in {**by_rate, **rates}.items()
        },
        "tokens_equal": equal,
        "peak_mb": {side: max(each[side].peak_mb for each in every) for side in plan.sides},
        "tokens": _by_count(rounds, lambda each: sum(map(len, each[0]["hf"].tokens))),
        "rounds": _by_count(rounds, len),
        **_conditions(plan),
    }


def _by_count(rounds: Mapping[int, Sequence[Round]], of: Any) -> dict[str, Any]:
    return {str(count): of(each) for count, each in rounds.items()}


def _medians(by_count: Mapping[str, list[float]]) -> dict[str, float]:
    return {count: median(values) for count, values in by_count.items()}


def _spread(values: Sequence[float]) -> dict[str, float]:
    least, most = spread(values)
    return {"median": median(values), "min": least, "max": most}


def tokens_equal(rounds: Sequence[Round], ours: str, peer: str) -> float:
    """Share of sequences with the same tokens on both sides."""
    pairs = [pair for each in rounds for pair in zip(each[ours].tokens, each[peer].tokens, strict=True)]
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


def check_equal(shares: Mapping[str, float], floor: float) -> None:
    """Raise SluiceError for a peer whose tokens differ in more sequences than near-ties of float32 explain."""
    bad = {peer: share for peer, share in shares.items() if share < floor}
    if bad:
        named = ", ".join(f"{peer} {share:.2f}" for peer, share in bad.items())
        raise SluiceError(
            f"share of sequences with equal greedy tokens below {floor}: {named}; the engines do not compute the "
            "same, so no ratio is fair"
        )


def _conditions(plan: Plan) -> dict[str, Any]:
    import torch
    import transformers

    found = {
        "longest": plan.longest,
        "threads": plan.threads,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": plan.model.name,
    }
    return {**found, "why_no_vllm": plan.why_no_vllm} if plan.why_no_vllm else found
