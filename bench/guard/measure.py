"""The guard's share of a step, what it saves, and two whole runs, without the guard and with it.

- The engine measures the guard's cost inside its process, read every quarter of a second. Only intervals count in which
  every step had all sequences. They have fewer tokens than `min_new_tokens`: the guard watches all and ends none.
- Savings: half of the workload loops. Loops begin after 0 to 256 generated tokens, with every period of
  `sluice.bench.models.PERIODS` equally often. The guard must do what the rule says for the known continuation.
- The oracle ends a looping sequence at the first token from which the rest is periodic for good, with a period of at
  most `ngram_size`; it does nothing else. It ignores sequences that end by themselves.
- A whole run has producer, one worker, consumer and trainer on their own broker. Every rollout is right, so the trainer
  trains on all of its tokens; the learning rate is too small to change the model's output. Its clock runs from the
  first look that finds the worker's engine loaded (four a second) to the trainer's last step.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sluice.bench.engines import greedy, make_engine, random_ids
from sluice.bench.guard.rule_cost import ANY_PERIOD, DEFAULTS, ns_per_token
from sluice.bench.harness import HOME, BenchPlan, run_interruptible, say, write_rows
from sluice.bench.models import HEALTHY, LEAD, LOOPING_CONTEXT, Chains, endless_model, looping_model, word
from sluice.bench.processes import Fleet, Parent, engine_environment, run_settings
from sluice.consumers.training.step_log import read_steps
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError, SluiceError
from sluice.pipeline.run.progress_panel import Progress
from sluice.pipeline.run.stack import INTERRUPTED, run_stack
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.status.snapshot import Snapshot
from sluice.workers.engine.contracts import SequenceOutput
from sluice.workers.guard.repeat import RepeatGuard
from sluice.workers.guard.watch import GuardCost

THREADS = 1
_INTERVAL_S = 0.25
_PROMPT = 16  # tokens
_ROUNDS = 20  # at most
_MAX_BATCH = 64
_LEAD_STRIDE, _HEALTHY_STRIDE = 97, 131  # coprime to the spans, so neighbours differ a lot
_SIZE = DEFAULTS.ngram_size or 0
_SHORTEST = 320  # new tokens; DEFAULTS cannot end anything much earlier
_VERSIONS = 4
_COUNTERS = {
    "tokens": "rollout/gen_new_tokens_total",
    "triggered": "rollout/repeat_terminate_triggered_sequences",
    "saved": "rollout/repeat_terminate_tokens_saved",
}


class Plan(BenchPlan, frozen=True, kw_only=True):
    """`counts` of sequences for the step share; `sequences` of the loop-prone workload, of `longest` new tokens."""

    counts: tuple[int, ...]
    steps: int = 200  # at least this many for each count
    rounds: int = 31  # of the rule alone
    stream_tokens: int = 2048  # that it reads in each
    sequences: int
    longest: int
    run_sequences: int  # of each whole run; 0: none
    run_longest: int = 1024
    vllm: bool = True

    QUICK = {"steps": 20, "rounds": 3, "sequences": 48, "longest": 512, "run_sequences": 16, "run_longest": _SHORTEST}
    BOUNDS = {"longest": (_SHORTEST, LOOPING_CONTEXT - 1), "run_sequences": (0, math.inf)}

    def __post_init__(self) -> None:
        if 0 < self.run_sequences < _VERSIONS:
            raise ConfigError(f"--run-sequences {self.run_sequences} is less than {_VERSIONS}; 0 skips the runs")

    @property
    def backends(self) -> tuple[str, ...]:
        return ("hf",) if self.why_no_vllm else ("hf", "vllm")


def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`step_share`: guard time over step time inside the engine's process, by backend and number of sequences.
    `ns_per_token`, `naive_ns_per_token`, `upstream_ns_per_token`: of the rule alone, see `guard.rule_cost`;
    `any_period_ns_per_token` and `object_keys_ns_per_token` with that one key more. `saved_share`: tail tokens saved by
    the guard, over an oracle's; `saved_share_any_period`: the same with that key; `saved_share_ceiling`: the maximum
    for any rule armed after `min_new_tokens`. `trained_per_s`, `tokens`: of whole runs without the guard and with it;
    `triggered` and `tokens_saved`: the second run's own metrics. Null if a part didn't run.
    """
    alone = ns_per_token(plan.rounds, plan.stream_tokens, vllm="vllm" in plan.backends)
    say("ns a token: " + ", ".join(f"{name} {value}" for name, value in alone["ns_by_stream"].items()))
    found = run_interruptible(_in_engines(plan, home))
    whole = _whole_runs(plan, home) if plan.run_sequences else {"trained_per_s": None, "tokens": None}
    return {**found, **alone, **whole, "thresholds": msgspec.to_builtins(DEFAULTS), "threads": THREADS}


async def _in_engines(plan: Plan, home: Path) -> dict[str, Any]:
    return {**await step_share(plan, home), **await saved(plan.sequences, plan.longest, home)}


def _whole_runs(plan: Plan, home: Path) -> dict[str, Any]:
    truth = {"answer": "w", "pattern": "w"}  # any output contains it
    prompts = (word(each.token) for each in starts(Chains.make(), plan.run_sequences))
    write_rows(home / "rows.jsonl", prompts, truth)
    found = {name: _run(_config(plan, home, name)) for name in ("off", "on")}
    for name, run in found.items():
        say(f"run with the guard {name}: {run['trained_per_s']:.2f} samples/s trained, {run['tokens']:.0f} tokens")
    fields = {key: {name: run[key] for name, run in found.items()} for key in found["on"]}
    return {
        **{key: fields[key] for key in ("trained_per_s", "tokens", "run_s", "trainer_step_s")},
        "trained_speedup": fields["trained_per_s"]["on"] / fields["trained_per_s"]["off"],
        "tokens_saved": fields["saved"]["on"],
        "triggered": fields["triggered"]["on"],
    }


def _run(config: Config) -> dict[str, float]:
    began = 0.0

    async def watch(now: Snapshot, supervisor: Supervisor, progress: Progress) -> None:
        nonlocal began
        if not began and any("running" in row.facts for row in now.alive("worker")):
            began = time.time()

    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result: without a terminal the run prints there
        code = run_stack(config, title=f"sluice bench guard · {config.run}", watch=watch)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    run_dir = Path(config.run_dir) / config.run
    steps = read_steps(run_dir / "metrics.jsonl")
    trained = sum(len(step["seq_ids"]) for step in read_steps(run_dir / "trained.jsonl"))
    if code or trained != config.data.limit:
        raise SluiceError(f"{config.run} ended with {code} and {trained} of {config.data.limit} samples trained")
    seconds = steps[-1]["at"] - began
    counters = {name: int(sum(step[key] for step in steps)) for name, key in _COUNTERS.items()}
    step_s = sum(step["train/step_s"] for step in steps)
    return {"trained_per_s": trained / seconds, "run_s": seconds, "trainer_step_s": step_s, **counters}


def _config(plan: Plan, home: Path, guard: str) -> Config:
    count = plan.run_sequences
    settings = run_settings(
        f"guard-{guard}", looping_model(HOME), "dashboard.enabled=false", f"run_dir={home / 'runs'}",
        f"broker.embedded_dir={home / f'broker-{guard}'}", f"data.path={home / 'rows.jsonl'}", f"data.limit={count}",
        "sampling.temperature=0", f"sampling.max_new_tokens={plan.run_longest}",
        f"producer.samples_per_version={-(-count // _VERSIONS)}", f"producer.max_in_flight={count + _VERSIONS}",
        "worker.count=1", f"worker.max_batch={_MAX_BATCH}", "consumer.row_tokens=2048",
        f"rollout_matching.repeat_terminate.enabled={str(guard == 'on').lower()}", "trainer.learning_rate=1.0e-9",
        "trainer.micro_batch_tokens=4096",
    )  # fmt: skip
    return load_config(None, settings, {})


class Work(msgspec.Struct, frozen=True):
    """Greedy sequences, all at once, each of `num_new_tokens` unless it ends earlier."""

    prompts: list[list[int]]
    num_new_tokens: int


class Done(msgspec.Struct, frozen=True):
    """By sequence: its tokens, and how many precede the one the guard forced (None: it ended otherwise).

    The guard's cost over the steps in which every sequence ran: its own time, and that of whole steps.
    """

    tokens: list[list[int]]
    at_token: list[int | None]
    steps: int = 0
    spent_ns: float = 0.0
    elapsed_ns: float = 0.0


@contextlib.asynccontextmanager
async def engine(
    backend: str, model: Path, max_batch: int, logs: Path, thresholds: RepeatTerminateConfig = DEFAULTS
) -> AsyncIterator[Fleet]:
    """One process that answers each Work with a Done, started and warm; closed after the block."""
    arguments, env = [backend, str(model), max_batch, msgspec.to_builtins(thresholds)], engine_environment(THREADS)
    async with Fleet.of_children(f"{backend}-{model.name}", logs, serve, arguments, env=env) as fleet:
        await fleet.ask(Work([[1, 2, 3]], 16), Done)
        yield fleet


async def serve(parent: Parent, name: str, model: str, max_batch: int, thresholds: dict[str, Any]) -> None:
    """The engine's process: it loads and says `ready`; then each request is a Work, answered with a Done."""
    import torch

    torch.set_num_threads(THREADS)
    backend = make_engine(name, Path(model), max_batch, msgspec.convert(thresholds, RepeatTerminateConfig))
    await backend.start()
    parent.tell("ready")
    async for work in parent.requests(Work):
        parent.tell(await _decode(backend, work))


async def _decode(backend: Any, work: Work) -> Done:
    asks = [greedy(number, prompt, work.num_new_tokens) for number, prompt in enumerate(work.prompts)]
    tasks = [asyncio.create_task(backend.decode(ask)) for ask in asks]
    waiting, steady = set[asyncio.Task[SequenceOutput]](tasks), list[GuardCost]()
    while waiting:
        _, waiting = await asyncio.wait(waiting, timeout=_INTERVAL_S)
        cost: GuardCost = await backend.guard_cost()
        if cost.steps > 1 and cost.tokens == cost.steps * len(asks):
            steady.append(cost)
    outputs = [task.result() for task in tasks]
    return Done(
        [output.token_ids for output in outputs],
        [None if output.trigger is None else output.trigger.at_token for output in outputs],
        sum(cost.steps for cost in steady),
        sum(cost.spent_ns for cost in steady),
        # of k steps in an interval, k - 1 have another one before them
        sum(cost.elapsed_ns * cost.steps / (cost.steps - 1) for cost in steady),
    )


async def step_share(plan: Plan, home: Path) -> dict[str, Any]:
    """Over at least `plan.steps` steps of each backend, by number of sequences."""
    names = ("step_share", "guard_us_per_step", "step_ms")
    fields: dict[str, dict[str, dict[str, float]]] = {name: {each: {} for each in plan.backends} for name in names}
    for backend in plan.backends:
        async with engine(backend, endless_model(HOME), max(plan.counts), home) as running:
            for count in sorted(set(plan.counts)):
                taken, spent, elapsed = await _measured(running, count, plan.steps)
                values = (spent / elapsed, spent / taken / 1e3, elapsed / taken / 1e6)
                for name, value in zip(names, values, strict=True):
                    fields[name][backend][str(count)] = value
                say(f"{backend}, {count} sequences: guard {spent / elapsed:.4f} of a step ({taken} steps)")
    return fields


async def _measured(running: Fleet, count: int, wanted: int) -> tuple[int, float, float]:
    """Steps, nanoseconds in the guard, nanoseconds in total."""
    steps, spent, elapsed = 0, 0.0, 0.0
    for number in range(_ROUNDS):
        chance = random.Random(number)
        prompts = [random_ids(chance, _PROMPT) for _ in range(count)]
        (done,) = await running.ask(Work(prompts, DEFAULTS.min_new_tokens - 1), Done)
        if any(at is not None for at in done.at_token):
            raise SluiceError("the guard ended a sequence of the cost measurement")
        steps, spent, elapsed = steps + done.steps, spent + done.spent_ns, elapsed + done.elapsed_ns
        if steps >= wanted:
            return steps, spent, elapsed
    raise SluiceError(f"{count} sequences never ran together for {wanted} steps in {_ROUNDS} rounds")


class Start(NamedTuple):
    """One sequence: the token that is its prompt, and the period of its loop, 0 for none."""

    token: int
    period: int

    @property
    def kind(self) -> str:
        """By what the guard detects: a run of one token, a block that is a whole number of periods, or neither."""
        if self.period < 2:
            return "one_token" if self.period else "none"
        return "other" if _SIZE % self.period else f"divides_{_SIZE}"


def starts(chains: Chains, count: int) -> list[Start]:
    """Looping and healthy ones, alternating."""
    found: list[Start] = []
    for at in range((count + 1) // 2):
        lead, loop = chains.loops[at % len(chains.loops)]
        found.append(Start(lead[LEAD - 1 - at * _LEAD_STRIDE % LEAD], len(loop)))
        found.append(Start(chains.healthy[at * _HEALTHY_STRIDE % HEALTHY], 0))
    return found[:count]


def oracle_keeps(tokens: Sequence[int], longest_period: int) -> int:
    """Tokens before the first one from which the rest is periodic, at least twice the period long.

    `tokens` are all the sequence would have; len(tokens) if there is no such place.
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
    """Tokens before the one the guard forces; len(tokens) if it forces none, or only the last."""
    guard = RepeatGuard(config)
    for token in tokens[:-1]:
        if guard.push(token) is not None:
            return guard.length
    return len(tokens)


async def saved(sequences: int, longest: int, home: Path) -> dict[str, Any]:
    chains = Chains.make()
    work = starts(chains, sequences)
    full = [chains.continuation(start.token, longest) for start in work]
    pairs = zip(work, full, strict=True)
    oracle = [oracle_keeps(whole, _SIZE) if start.period else len(whole) for start, whole in pairs]
    ask = Work([[start.token] for start in work], longest)
    shares: dict[str, dict[str, Any]] = {}
    for name, thresholds in (("the rule", DEFAULTS), ("any_period", ANY_PERIOD)):
        async with engine("hf", looping_model(HOME), _MAX_BATCH, home, thresholds) as running:
            (done,) = await running.ask(ask, Done)
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
    }


def fields(
    work: Sequence[Start], full: Sequence[Sequence[int]], kept: Sequence[int], oracle: Sequence[int]
) -> dict[str, Any]:
    """`full`: tokens without a guard; `kept`, `oracle`: how many of them the guard and the oracle keep."""
    guard, most, ended = Counter[str](), Counter[str](), Counter[bool]()
    for start, whole, mine, best in zip(work, full, kept, oracle, strict=True):
        looping = start.period > 0
        ended[looping] += mine < len(whole)
        if looping:
            guard[start.kind] += len(whole) - mine
            most[start.kind] += len(whole) - best
    of_looping, whole = sum(start.period > 0 for start in work), sum(map(len, full))
    return {
        "saved_share": guard.total() / most.total() if most.total() else 0.0,
        "saved_share_by_period": {kind: guard[kind] / most[kind] if most[kind] else 0.0 for kind in most},
        "tail_tokens": {"without": whole, "saved_by_guard": guard.total(), "saved_by_oracle": most.total()},
        "ended": {"looping": ended[True], "of_looping": of_looping, "healthy": ended[False]},
    }


def _check(done: Done, full: Sequence[Sequence[int]], end: int, thresholds: RepeatTerminateConfig) -> None:
    """Raises SluiceError unless the engine did what the model and the rule determine."""
    for tokens, at, whole in zip(done.tokens, done.at_token, full, strict=True):
        keeps = guard_keeps(whole, thresholds)
        wanted = [*whole[:keeps], end] if at is not None else list(whole)
        if tokens != wanted or (at is None) != (keeps == len(whole)):
            rule = f"the rule says {keeps} of {len(whole)}"
            raise SluiceError(f"a sequence of {len(tokens)} tokens, ended by the guard at {at}: {rule}")
