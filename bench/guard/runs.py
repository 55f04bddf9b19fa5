"""The loop-prone workload through two whole runs, as `sluice run` starts them: without the guard and with it.

- Producer, one worker, consumer and trainer on a broker of the run's own. Every rollout is right, so the trainer
  trains on all of its tokens; the learning rate is too small to change what the model says.
- A run's clock runs from the first look at which its worker had its engine (four looks a second) to the trainer's
  last step. The counters are the run's own metrics.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from sluice.bench.guard.loop_model import Chains, ensure_model, word
from sluice.bench.guard.plan import HOME, Plan
from sluice.bench.guard.workload import starts
from sluice.bench.report import say
from sluice.consumers.training.step_log import read_steps
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.run.progress_panel import Progress
from sluice.pipeline.run.stack import INTERRUPTED, run_stack
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.status.snapshot import Snapshot

_VERSIONS = 4
_COUNTERS = {
    "tokens": "rollout/gen_new_tokens_total",
    "triggered": "rollout/repeat_terminate_triggered_sequences",
    "saved": "rollout/repeat_terminate_tokens_saved",
}


def runs(plan: Plan, home: Path) -> dict[str, Any]:
    """The fields of this part."""
    data = home / "rows.jsonl"
    _write_rows(data, plan.run_sequences)
    found = {name: _run(_config(plan, home, data, name == "on")) for name in ("off", "on")}
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


def _config(plan: Plan, home: Path, data: Path, guarded: bool) -> Config:
    run = f"guard-{'on' if guarded else 'off'}"
    settings = {
        "run": run,
        "dashboard.enabled": "false",
        "run_dir": home / "runs",
        "broker.embedded_dir": home / f"broker-{run}",
        "model.path": ensure_model(HOME).resolve(),
        "data.path": data,
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
        "rollout_matching.repeat_terminate.enabled": str(guarded).lower(),
        "trainer.learning_rate": "1.0e-9",
        "trainer.micro_batch_tokens": 4096,
    }
    return load_config(None, [f"{key}={value}" for key, value in settings.items()], {})


def _write_rows(path: Path, count: int) -> None:
    """Prompts of one token; the answer is found in whatever is written."""
    truth = {"answer": "w", "pattern": "w"}
    rows = [
        {"id": number, "messages": [{"role": "user", "content": word(start.token)}], "truth": truth}
        for number, start in enumerate(starts(Chains.make(), count))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
