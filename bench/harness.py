"""What all benchmarks share: checked options, a private directory, alternating rounds, statistics, one JSON object.

    Plan.of(options) ─▶ run ─▶ measure(plan, home) ─┬▶ play: every side, round by round     ─┬─▶ finish: stdout
                                                    └▶ ratios, spread, median, percentile   ─┘   say: stderr

The sides of a round do the same work, and each round begins with a different side, so drift of the machine affects
them equally. A ratio is the median of the rounds' ratios, never the ratio of the medians.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from sluice.pipeline.errors import ConfigError, DeadlineExceeded
from sluice.pipeline.files import write_atomic

T = TypeVar("T")

HOME = Path(".sluice/bench")
SCHEMA_VERSION = 1


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark measures: its options by name, and sizes that have none. Numbers are at least 1."""

    QUICK: ClassVar[Mapping[str, Any]] = {}  # upper bounds with --quick
    BOUNDS: ClassVar[Mapping[str, tuple[int, float]]] = {}  # of options with other limits

    @classmethod
    def of(cls, *, quick: bool = False, **options: Any) -> Self:
        """Checked; an option that is None has its default. Raises ConfigError."""
        given = {name: value for name, value in options.items() if value is not None}
        for name, value in given.items():
            numbers = value if isinstance(value, tuple) else (value,)
            least, most = cls.BOUNDS.get(name, (1, math.inf))
            if not numbers or any(not least <= each <= most for each in numbers if type(each) in (int, float)):
                limits = f"at least {least}" if most == math.inf else f"{least} to {most}"
                raise ConfigError(f"--{name.replace('_', '-')} must be {limits}, got {value}")
        if quick:
            given |= {name: min(given.get(name, most), most) for name, most in cls.QUICK.items()}
        return cls(**given)

    @property
    def why_no_vllm(self) -> str | None:
        """None: vLLM is measured, or has no part in this benchmark."""
        wanted = getattr(self, "vllm", None)
        return None if wanted is None else why_no_vllm(wanted)


def why_no_vllm(wanted: bool) -> str | None:
    """None: vLLM is measured."""
    if not wanted:
        return "not asked for"
    return None if find_spec("vllm") else "vllm is not installed"


@contextlib.contextmanager
def own_directory() -> Iterator[Path]:
    """For logs, brokers and runs; removed at the end, even on Ctrl-C."""
    HOME.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=HOME)).resolve()
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def run(measure: Callable[[Any, Path], Coroutine[Any, Any, dict[str, Any]] | dict[str, Any]], plan: BenchPlan) -> Any:
    """The benchmark's result over its plan's numbers (also together, as `sizes`), and `why_no_vllm` if there is one."""
    with own_directory() as home:
        found = measure(plan, home)
        found = run_interruptible(found) if isinstance(found, Coroutine) else found
    sizes, why = msgspec.to_builtins(plan, enc_hook=str), plan.why_no_vllm
    return {**sizes, **found, "sizes": sizes, **({"why_no_vllm": why} if why else {})}


def run_interruptible(bench: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine. On SIGTERM as on Ctrl-C its scopes close, then KeyboardInterrupt is raised."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return asyncio.run(bench)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, Any]) -> AsyncGenerator[None]:
    """Run the work during the block; raises its error if it ends early."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def until(
    holds: Callable[[], Awaitable[Any]],
    what: str,
    deadline_s: float,
    *,
    every_s: float = 0.1,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Return once it holds. `check` raises if it never will. Raises DeadlineExceeded."""
    end = time.monotonic() + deadline_s
    while not await holds():
        check()
        if time.monotonic() > end:
            raise DeadlineExceeded(f"waited {deadline_s:.0f} s for {what}")
        await asyncio.sleep(every_s)


def write_rows(file: Path, questions: Iterable[str], truth: Any) -> None:
    """What a producer reads: a prompt a row, numbered, with the same truth."""
    with file.open("w") as rows:
        for at, question in enumerate(questions):
            row = {"id": at, "messages": [{"role": "user", "content": question}], "truth": truth}
            rows.write(json.dumps(row) + "\n")


def in_turns(number: int, sides: Sequence[T]) -> list[T]:
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


async def play(
    rounds: int,
    sides: Sequence[str],
    one: Callable[[str, int], Awaitable[T]],
    check: Callable[[int, Mapping[str, T]], None] = lambda number, found: None,
    *,
    warm: int = 0,
    show: Callable[[T], str] | None = None,
    what: str = "round",
) -> list[dict[str, T]]:
    """Call `one(side, number)` for every side in every round; `check` gets each round and may refuse it.

    `warm` rounds come first, with numbers below 0; they are checked, and not returned. `show` makes a line per round.
    """
    played: list[dict[str, T]] = []
    for number in range(-warm, rounds):
        found = {side: await one(side, number) for side in in_turns(number, sides)}
        check(number, found)
        if number < 0:
            continue
        played.append(found)
        if show is not None:
            say(f"{what} {number + 1}/{rounds}: " + ", ".join(f"{side} {show(found[side])}" for side in sides))
    return played


def ratios(rounds: Sequence[Mapping[str, T]], ours: str, theirs: str, of: Callable[[T], float]) -> list[float]:
    """Ours over theirs, round by round; 0 if theirs is 0."""
    return [of(each[ours]) / of(each[theirs]) if of(each[theirs]) else 0.0 for each in rounds]


def median_of(rounds: Sequence[Mapping[str, T]], side: str, of: Callable[[T], float]) -> float:
    """Over the rounds."""
    return median(of(each[side]) for each in rounds)


def spread(values: Iterable[float]) -> list[float]:
    """Minimum and maximum."""
    found = list(values)
    return [min(found), max(found)]


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank; `share` in (0, 1]. Raises ValueError if there are no values."""
    if not values or not 0 < share <= 1:
        raise ValueError(f"a percentile needs values and a share in (0, 1], got {len(values)} and {share}")
    return sorted(values)[math.ceil(share * len(values)) - 1]


def by_count(found: Mapping[Any, T], of: Callable[[T], Any] = lambda value: value) -> dict[str, Any]:
    """As JSON has it: keys are strings."""
    return {str(count): of(value) for count, value in found.items()}


def aim(sign: str, bound: float, found: float | None) -> dict[str, Any]:
    """A target, `<=` or `>=` a bound, and whether it is met; None if nothing was found."""
    met = None if found is None else found <= bound if sign == "<=" else found >= bound
    return {"aim": f"{sign} {bound}", "found": found, "met": met}


def say(line: str) -> None:
    """One readable line on stderr, immediately."""
    print(line, file=sys.stderr, flush=True)


def finish(result: Mapping[str, Any], *, as_json: bool, out: Path | None = None) -> None:
    """Print the result: one line per value, or one JSON object; adds `schema_version` and the machine's load.

    `out`: also a file for the JSON object.
    """
    machine = {"cpus": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}
    full = {"schema_version": SCHEMA_VERSION, **_rounded(result), **machine}
    if out is not None:
        write_atomic(out, json.dumps(full, indent=1))
    if as_json:
        print(json.dumps(full), flush=True)
        return
    for name, value in full.items():
        print(f"{name:24} {json.dumps(value) if isinstance(value, list | dict) else value}", flush=True)


def _rounded(value: Any) -> Any:
    """Round all nested floats to 5 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
