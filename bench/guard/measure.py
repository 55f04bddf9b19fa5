"""What one run does, the two whole runs, and the fields of the JSON object.

- A whole run is one that `sluice run` starts: producer, one worker, consumer and trainer on a broker of its own. Every
  rollout is right, so the trainer trains on all of its tokens; the learning rate is too small to change what the model
  says.
- A run's clock runs from the first look at which its worker had its engine (four looks a second) to the trainer's
  last step. The counters are the run's own metrics.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.guard.engine import THREADS, step_share
from sluice.bench.guard.rule_cost import DEFAULTS, ns_per_token
from sluice.bench.guard.savings import saved, starts
from sluice.bench.harness import HOME, at_least_one, own_directory, run_interruptible, say, why_no_vllm
from sluice.bench.models import LOOPING_CONTEXT, Chains, looping_model, word
from sluice.consumers.training.step_log import read_steps
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import ConfigError, SluiceError
from sluice.pipeline.run.progress_panel import Progress
from sluice.pipeline.run.stack import INTERRUPTED, run_stack
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.status.snapshot import Snapshot

_STREAM = 2048  # tokens
_SHORTEST = 320  # new tokens; DEFAULTS cannot end anything much earlier
_RUN_LONGEST = 1024
_VERSIONS = 4
_COUNTERS = {
    "tokens": "rollout/gen_new_tokens_total",
    "triggered": "rollout/repeat_terminate_triggered_sequences",
    "saved": "rollout/repeat_terminate_tokens_saved",
}


@dataclass(frozen=True)
class Plan:
    """`counts` of sequences for the step share; `sequences` of the loop-prone workload, of `longest` new tokens."""

    counts: tuple[int, ...]
    steps: int  # at least so many for each count
    rounds: int  # of the rule alone
    sequences: int
    longest: int
    run_sequences: int  # of each whole run; 0: none
    run_longest: int
    why_no_vllm: str | None  # None: vLLM is measured

    @property
    def backends(self) -> tuple[str, ...]:
        """In the order of measuring."""
        return ("hf",) if self.why_no_vllm else ("hf", "vllm")

    @classmethod
    def of(
        cls, *, counts: tuple[int, ...], sequences: int, longest: int, run_sequences: int, vllm: bool, quick: bool
    ) -> Plan:
        """Checked. Raises ConfigError."""
        at_least_one(counts=counts, sequences=sequences)
        if not _SHORTEST <= longest < LOOPING_CONTEXT:
            raise ConfigError(f"--longest {longest} is outside {_SHORTEST}..{LOOPING_CONTEXT - 1}")
        if run_sequences and run_sequences < 4:
            raise ConfigError(f"--run-sequences {run_sequences} is less than 4; 0 leaves the runs out")
        why, ordered = why_no_vllm(vllm), tuple(sorted(set(counts)))
        if quick:
            return cls(ordered, 20, 3, min(sequences, 48), min(longest, 512), min(run_sequences, 16), _SHORTEST, why)
        return cls(ordered, 200, 31, sequences, longest, run_sequences, min(longest, _RUN_LONGEST), why)


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark; the fields of its JSON object.

    `step_share`: guard time over step time inside the engine's process, by backend and number of sequences.
    `ns_per_token`, `naive_ns_per_token`, `upstream_ns_per_token`: of the rule alone, see `guard.rule_cost`;
    `any_period_ns_per_token` and `object_keys_ns_per_token` with that one key more.
    `saved_share`: tail tokens that the guard saves over those of an oracle, see `guard.savings`;
    `saved_share_any_period`: the same with that key; `saved_share_ceiling`: what any rule could that is armed after
    `min_new_tokens`.
    `trained_per_s`, `tokens`: of whole runs without the guard and with it; `triggered` and `tokens_saved` of the
    second by its own metrics. Null where a part did not run.
    """
    with own_directory() as home:
        alone = ns_per_token(plan.rounds, _STREAM, vllm="vllm" in plan.backends)
        say("ns a token: " + ", ".join(f"{name} {value}" for name, value in alone["ns_by_stream"].items()))
        found = run_interruptible(_in_engines(plan, home))
        whole = _whole_runs(plan, home) if plan.run_sequences else {"trained_per_s": None, "tokens": None}
    conditions = {
        "thresholds": msgspec.to_builtins(DEFAULTS),
        "stream_tokens": _STREAM,
        "sequences": plan.sequences,
        "longest": plan.longest,
        "run_sequences": plan.run_sequences,
        "run_longest": plan.run_longest,
        "threads": THREADS,
    }
    why = {"why_no_vllm": plan.why_no_vllm} if plan.why_no_vllm else {}
    return {**found, **alone, **whole, **conditions, **why}


async def _in_engines(plan: Plan, home: Path) -> dict[str, Any]:
    shares = await step_share(plan.backends, plan.counts, plan.steps, home)
    return {**shares, **await saved(plan.sequences, plan.longest, home)}


def _whole_runs(plan: Plan, home: Path) -> dict[str, Any]:
    _write_rows(home / "rows.jsonl", plan.run_sequences)
    found = {name: _run(_config(plan, home, name)) for name in ("off", "on")}
    off, on = found["off"], found["on"]
    for name, run in found.items():
        say(f"run with the guard {name}: {run['trained_per_s']:.2f} samples/s trained, {run['tokens']:.0f} tokens")
    return {
        "trained_per_s": {name: run["trained_per_s"] for name, run in found.items()},
        "trained_speedup": on["trained_per_s"] / off["trained_per_s"],
        "tokens": {name: int(run["tokens"]) for name, run in found.items()},
        "run_s": {name: run["seconds"] for name, run in found.items()},
        "trainer_step_s": {name: run["step_s"] for name, run in found.items()},
        "tokens_saved": int(on["saved"]),
        "triggered": int(on["triggered"]),
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
    counters = {name: sum(step[key] for step in steps) for name, key in _COUNTERS.items()}
    step_s = sum(step["train/step_s"] for step in steps)
    return {"trained_per_s": trained / seconds, "seconds": seconds, "step_s": step_s, **counters}


def _config(plan: Plan, home: Path, guard: str) -> Config:
    run = f"guard-{guard}"
    settings = {
        "run": run,
        "dashboard.enabled": "false",
        "run_dir": home / "runs",
        "broker.embedded_dir": home / f"broker-{run}",
        "model.path": looping_model(HOME),
        "data.path": home / "rows.jsonl",
        "data.limit": plan.run_sequences,
        "sampling.temperature": 0,
        "sampling.max_new_tokens": plan.run_longest,
        "producer.samples_per_version": -(-plan.run_sequences // _VERSIONS),
        "producer.max_in_flight": plan.run_sequences + _VERSIONS,
        "worker.count": 1,
        "worker.max_batch": 64,
        "worker.claim_gpu": "false",
        "consumer.row_tokens": 2048,
        "rollout_matching.task": "exact_answer",
        "rollout_matching.repeat_terminate.enabled": str(guard == "on").lower(),
        "trainer.learning_rate": "1.0e-9",
        "trainer.micro_batch_tokens": 4096,
    }
    return load_config(None, [f"{key}={value}" for key, value in settings.items()], {})


def _write_rows(path: Path, count: int) -> None:
    """Prompts of one token; the answer is found in whatever is written."""
    rows = [
        {
            "id": number,
            "messages": [{"role": "user", "content": word(start.token)}],
            "truth": {"answer": "w", "pattern": "w"},
        }
        for number, start in enumerate(starts(Chains.make(), count))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
