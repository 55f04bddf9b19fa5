"""Every benchmark at a small size, and which promised figures moved against a stored run of the same machine.

    rounds × benches, in turns ─▶ `sluice bench NAME --json` ─▶ its guarded figures ─▶ value, spread ─┬─▶ moved
                                                       a stored run ─▶ value, spread ─────────────────┘

- Each bench is a process of its own. One that fails is named, and the others still run.
- The rounds go through all benches, and each begins with another one: a machine that becomes slower on the way shows in
  the spread of every figure, and not as one that moved.
- `value` is the median of the rounds, and `spread` how far the farthest round is from it, but at least a share of the
  value that the table below names: a few rounds don't show all noise. A figure that must not change at all has 0.
- A figure moved if the two ranges, value ± spread, don't meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import msgspec

from sluice.bench.harness import in_turns, run_interruptible, say
from sluice.pipeline.child_process import tethered
from sluice.pipeline.errors import ConfigError, DataError, DeadlineExceeded, SluiceError
from sluice.pipeline.run.env import gpus, machine
from sluice.pipeline.run.provenance import main_versions
from sluice.pipeline.run.supervisor import sluice_command

_BENCH_S = 1800.0  # of one bench in one round
_END_S = 20.0  # from SIGTERM to SIGKILL
_LINE_LIMIT = 1 << 24
_GIT_S = 10.0

NOISE = 0.15
"""The least spread of times and rates, as a share of the value."""


@dataclass(frozen=True)
class Figure:
    """`better`: in which direction. `floor`: the least spread, as a share of the value."""

    better: Literal["more", "less", "same"]
    floor: float = NOISE


MORE, LESS, SAME = Figure("more"), Figure("less"), Figure("same", 0.0)
SHARE = Figure("more", 0.05)  # a ratio of two sides that ran in turns
BYTES = Figure("less", 0.02)
TAIL = Figure("less", 0.5)  # of a few samples


@dataclass(frozen=True)
class Guarded:
    """A bench: its options for a small size, and its figures by their path in its JSON object."""

    options: tuple[str, ...]
    figures: Mapping[str, Figure]


GUARDED: Mapping[str, Guarded] = {
    "pipeline": Guarded(
        ("--sequences", "128", "--rounds", "3"),
        {
            "efficiency": SHARE, "cpu_efficiency": SHARE, "pipeline_tok_s": MORE, "bytes_per_token": BYTES,
            "latency_queue_p50_s": LESS,
        },
    ),
    "queue": Guarded(
        ("--quick", "--workers", "2"),
        {
            "ours_jobs_s.2": MORE, "ours_worker_us.2": LESS, "ours_broker_us.2": LESS, "claims_per_job.2": SAME,
            "idle_p50_ms": LESS, "bulk_enqueue_s": MORE, "commit_s.1": MORE, "claim_us.2000": LESS,
            "deaths.2.killed_s": TAIL,
        },
    ),
    "engine": Guarded(
        ("--quick", "--counts", "32"),
        {
            "tok_s.hf.32": MORE, "tok_s.vllm.32": MORE, "hf_vs_padded.32": MORE, "vllm_efficiency.32": MORE,
            "startup_s.hf": LESS, "startup_s.vllm": LESS, "peak_mb.hf": BYTES,
        },
    ),
    "guard": Guarded(
        ("--quick", "--run-sequences", "0"),
        {"ns_per_token": LESS, "saved_share": SAME, "saved_share_any_period": SAME, "step_share.hf.64": TAIL},
    ),
    "proximal": Guarded(
        ("--quick",),
        {
            "publish_to_first_token_s.hf.median": LESS, "publish_to_first_token_s.vllm.median": LESS,
            "score_cost_ratio.hf.vs_kv_recompute": LESS, "valid_share.1": SAME,
        },
    ),
    "rollout": Guarded(
        ("--quick",),
        {"added_ms_p50": LESS, "rollouts_vs_direct": MORE, "prefix_reused_share": SHARE,
         "gateway_vs_vllm_serve": MORE},
    ),
    "images": Guarded(
        ("--quick",),
        {
            "pictures_processed_per_picture": SAME, "peak_ratio": Figure("less", 0.05),
            "tower_passes_per_picture.worker.frozen": SAME, "tower_passes_per_picture.trainer.frozen": SAME,
            "seconds.training": LESS, "seconds.decoding": LESS,
        },
    ),
    "train": Guarded(
        ("--quick",), {"peak_vs_plain": Figure("less", 0.1), "ranks_gradient_error": TAIL, "tok_s.ours": MORE}
    ),
    "crash": Guarded(("--quick",), {"bitwise_equal": SAME, "undisturbed_s": LESS, "killed_s": TAIL}),
    "operate": Guarded(
        ("--quick", "--sequences", "2000"),
        {
            "dashboard_p95_ms_max": TAIL, "help_s": LESS, "span_cpu_us": LESS, "spans_per_sequence": BYTES,
            "history_bytes_per_sequence": BYTES, "index_bytes_per_sequence": BYTES,
        },
    ),
    "fleet": Guarded(("--quick",), {"jain_aim.found": SHARE, "lowest_share": MORE, "rate_share": MORE}),
    "scale": Guarded(
        ("--count", "10000", "--workers", "20", "--idle-s", "5"),
        {
            "redis_bytes_per_queued_job": BYTES, "us_per_sequence.10000": LESS, "idle_broker_share_100_workers": TAIL,
            "claim_us": LESS,
        },
    ),
    "truth": Guarded(("--quick",), {"tokens_checked": SAME, "tokens_wrong": SAME}),
    "weights": Guarded(
        ("--quick",),
        {"delta_share": Figure("less", 0.1), "vs_copy.hf.directory": LESS, "vs_copy.vllm.directory": LESS},
    ),
    "elastic": Guarded(
        ("--quick",),
        {"lost": SAME, "twice": SAME, "redone_share": TAIL, "new_worker_s": LESS, "new_worker_parts.import": LESS},
    ),
}  # fmt: skip


class Measured(msgspec.Struct, frozen=True):
    """The median of the rounds, and the range around it in which another run on this machine is no news."""

    value: float
    spread: float

    @classmethod
    def of(cls, rounds: Sequence[float], floor: float) -> Measured:
        """`floor`: the least spread, as a share of the value; 0 for what may not differ at all, in no round: where it
        does, its mean is told apart from any clean value.
        """
        middle = median(rounds)
        if not floor:
            return cls(middle if len(set(rounds)) == 1 else fmean(rounds), 0.0)
        return cls(middle, max(floor * abs(middle), max(abs(one - middle) for one in rounds)))

    def meets(self, other: Measured) -> bool:
        return abs(self.value - other.value) <= self.spread + other.spread


class Stored(msgspec.Struct, kw_only=True):
    """What a run prints, as far as another one is compared with it."""

    machine: dict[str, Any]
    rounds: int
    sizes: dict[str, list[str]]  # the options of each bench
    benches: dict[str, dict[str, Measured]]


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A figure beyond the two spreads; `now` is null if it is no longer measured."""

    bench: str
    figure: str
    before: Measured
    now: Measured | None
    verdict: Literal["better", "worse", "gone"]

    def line(self) -> str:
        was = f"{self.before.value:.5g} ± {self.before.spread:.2g}"
        if self.now is None:
            return f"gone    {self.bench} {self.figure}: was {was}"
        share = f", {self.now.value / self.before.value - 1:+.0%}" if self.before.value else ""
        now = f"{self.now.value:.5g} ± {self.now.spread:.2g}"
        return f"{self.verdict:7} {self.bench} {self.figure}: {was} -> {now}{share}"


def read_stored(path: Path) -> Stored:
    """A run's JSON object. Raises DataError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Stored)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; --compare takes a file of `bench all --out`"
        ) from error
    except msgspec.DecodeError as error:
        raise DataError(f"{path}: not what `sluice bench all --out` writes: {error}") from error


def refuse_other_machine(base: Stored, here: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError that names both."""
    for fact in ("cpu", "gpus"):
        if base.machine.get(fact) != here[fact]:
            raise ConfigError(
                f"{name} was measured on another machine: {fact} {base.machine.get(fact) or 'none'!r} there and "
                f"{here[fact] or 'none'!r} here; store a run of this one, or compare all the same with --any-machine"
            )


def moved(base: Stored, sizes: Mapping[str, list[str]], now: Mapping[str, Mapping[str, Measured]]) -> list[Moved]:
    """Of the benches that both ran at the same size; worse ones first."""
    found: list[Moved] = []
    for bench, figures in base.benches.items():
        if bench not in now or base.sizes.get(bench) != sizes.get(bench):
            continue
        for name, before in figures.items():
            after = now[bench].get(name)
            if after is None or not before.meets(after):
                found.append(
                    Moved(
                        bench=bench, figure=name, before=before, now=after, verdict=_verdict(bench, name, before, after)
                    )
                )
    return sorted(found, key=lambda one: one.verdict == "better")


def _verdict(bench: str, name: str, before: Measured, after: Measured | None) -> Literal["better", "worse", "gone"]:
    if after is None:
        return "gone"
    better = GUARDED[bench].figures[name].better if name in GUARDED[bench].figures else "same"
    is_better = (after.value > before.value and better == "more") or (after.value < before.value and better == "less")
    return "better" if is_better else "worse"


def figure_of(result: Mapping[str, Any], path: str) -> float | None:
    """The number under this path; None if there is none, or no number: vLLM may not be installed."""
    found: Any = result
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def chosen(only: Iterable[str]) -> list[str]:
    """Names of benches; all if none is asked for. Raises ConfigError."""
    asked = list(dict.fromkeys(only))
    for name in asked:
        if name not in GUARDED:
            near = get_close_matches(name, GUARDED, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(GUARDED)}"
            raise ConfigError(f"--only {name}: no such benchmark; {hint}")
    return asked or list(GUARDED)


def facts() -> dict[str, Any]:
    """This machine, the versions of what decides speed, and the commit if there is one."""
    here, found = machine(), [text for name, text in sorted(gpus().items()) if name.isdigit()]
    return {
        "cpu": here["cpu"], "gpus": found, "memory": here["memory"].rpartition(" of ")[2], "system": here["system"],
        **main_versions(), "commit": _commit(),
    }  # fmt: skip


def _commit() -> str:
    """As `git describe` names it; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--tags"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def measure(only: Sequence[str], rounds: int, compare: Path | None, *, any_machine: bool) -> dict[str, Any]:
    """`benches`: value and spread of each figure. `failed`: why, by bench. `absent`: guarded figures that weren't
    measured. `moved`: against the stored run, null without one; `not_compared`: benches that only one of both has, or
    that ran at another size. Raises ConfigError, DataError.
    """
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {rounds}")
    names, here = chosen(only), facts()
    base = None if compare is None else read_stored(compare)
    if base is not None and not any_machine:
        refuse_other_machine(base, here, str(compare))
    results, failed = run_interruptible(_rounds(names, rounds))
    sizes = {name: list(GUARDED[name].options) for name in names}
    benches, absent = summary(results)
    found: dict[str, Any] = {
        "machine": here, "rounds": rounds, "sizes": sizes, "benches": msgspec.to_builtins(benches), "failed": failed,
        "absent": absent, "moved": None,
    }  # fmt: skip
    if base is not None:
        changes = moved(base, sizes, benches)
        other = [name for name in {*base.benches, *benches} if base.sizes.get(name) != sizes.get(name)]
        other += [name for name in benches if name not in base.benches and name not in other]  # it had failed there
        found |= {"moved": msgspec.to_builtins(changes), "not_compared": sorted(other)}
        for change in changes:
            say(change.line())
        say(f"{len(changes)} figures moved against {compare} ({base.machine.get('commit') or 'no commit'})")
        if other:
            say(f"not compared, for only one of both has them, or at another size: {', '.join(sorted(other))}")
    return found


def summary(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[dict[str, dict[str, Measured]], list[str]]:
    """Figures by bench, from the JSON objects of its rounds; and the paths of those that weren't in every round."""
    benches: dict[str, dict[str, Measured]] = {}
    absent: list[str] = []
    for name, rounds in results.items():
        for path, figure in GUARDED[name].figures.items():
            values = [figure_of(one, path) for one in rounds]
            known = [value for value in values if value is not None]
            if known and len(known) == len(values):
                benches.setdefault(name, {})[path] = Measured.of(known, figure.floor)
            else:
                absent.append(f"{name}.{path}")
    return benches, absent


async def _rounds(names: Sequence[str], rounds: int) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """The JSON objects of each bench, and why others failed; one that failed isn't tried again."""
    results: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name in in_turns(number, names):
            if name in failed:
                continue
            say(f"== round {number + 1} of {rounds}: {name}")
            try:
                results.setdefault(name, []).append(await _run(name))
            except SluiceError as error:
                failed[name] = str(error)
                results.pop(name, None)
                say(f"{name} failed: {error}")
    return results, failed


async def _run(name: str) -> dict[str, Any]:
    """One bench in a process of its own; its progress goes on to stderr. Raises SluiceError."""
    command = tethered(sluice_command("bench", name, "--json", *GUARDED[name].options))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, limit=_LINE_LIMIT, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stderr is not None
    last = ""

    async def pass_on(lines: asyncio.StreamReader) -> None:
        nonlocal last
        async for line in lines:
            text = line.decode(errors="replace").rstrip()
            last = text.strip() or last
            print(f"{name}: {text}", file=sys.stderr, flush=True)

    try:
        async with asyncio.timeout(_BENCH_S):
            said, _ = await asyncio.gather(process.stdout.read(), pass_on(process.stderr))
            code = await process.wait()
    except TimeoutError as error:
        raise DeadlineExceeded(f"not finished after {_BENCH_S:.0f} s; its last line: {last or 'none'}") from error
    finally:
        await _end(process)
    if code:
        raise SluiceError(f"ended with {code}: {last.removeprefix('error: ') or 'no output'}")
    try:
        return msgspec.json.decode(said.splitlines()[-1], type=dict[str, Any])
    except (IndexError, msgspec.DecodeError) as error:
        raise SluiceError(f"printed no JSON object: {error}") from error


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, with time to end its own processes; then SIGKILL."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
