"""The demo's composition root: warm start → pipeline (with a kill) → audit → report."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from demo import report
from demo.audit import Audit, audit
from demo.digits.data import write_jsonl
from demo.digits.warm_start import WarmStartProgress, WarmStartSettings, ensure_warm_start
from demo.drill import Drill
from demo.evaluator import heldout_scenes, measure
from pipeline.config import Config, load_config
from pipeline.errors import SluiceError
from pipeline.stack import run_stack

HELDOUT_SCENES = 200
HELDOUT_SEED = 77
_KEEP_RUNS = 3


def run_demo(directory: Path, *, seed: int, workers: int, kill: bool, as_json: bool) -> int:
    """Run it; 0 when the run is complete and nothing was lost or trained twice."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    torch.set_num_threads(2)
    warm = _warm_start(directory)
    _prune(directory / "runs")
    config = _config(directory, warm, seed, workers)
    run_dir = Path(config.run_dir) / config.run
    write_jsonl(Path(config.data.path), "train", config.data.limit or 1, seed + 1)
    drill = Drill(config, run_dir / "evals.jsonl", kill=kill)
    pipeline_started = time.monotonic()
    code = run_stack(config, title="sluice demo · digits", watch=drill.watch, extra=drill.processes())
    if code:
        return code
    pipeline_s = time.monotonic() - pipeline_started
    chosen = heldout_scenes(HELDOUT_SCENES, HELDOUT_SEED)
    final = _newest_version(run_dir)
    scores = {"warm": measure(warm, chosen)["f1"], "final": measure(final, chosen)["f1"]}
    found = audit(config, run_dir)
    summary = _summary(scores, found, drill, pipeline_s, time.monotonic() - started)
    page = report.write(run_dir, summary=summary, drill=drill, warm=warm, final=final, scenes=chosen[:6])
    _print(summary, page)
    if as_json:
        print(json.dumps(summary), flush=True)
    return 0 if not found.lost and not found.duplicated else 1


def _warm_start(directory: Path) -> Path:
    """One warm start serves every seed: it is the cached part."""
    tty = sys.stderr.isatty()
    last = 0.0

    def show(now: WarmStartProgress) -> None:
        nonlocal last
        if now.step < now.num_steps and time.monotonic() - last < (0.2 if tty else 5.0):
            return
        last = time.monotonic()
        line = f"warm start: step {now.step}/{now.num_steps}  loss {now.loss:.3f}  {now.elapsed_s:.0f} s"
        print(f"\r{line}\x1b[K" if tty else line, end="" if tty else "\n", file=sys.stderr, flush=True)

    path = ensure_warm_start(directory / "cache", WarmStartSettings(), show)
    if tty and last:
        print(file=sys.stderr)
    print(f"warm-started model: {path}", file=sys.stderr)
    return path


def _config(directory: Path, warm: Path, seed: int, workers: int) -> Config:
    run = time.strftime("digits-%Y%m%d-%H%M%S")
    run_dir = directory / "runs"
    overrides = [
        f"run={run}",
        f"seed={seed}",
        f"run_dir={run_dir}",
        f"broker.embedded_dir={run_dir / run / 'broker'}",
        f"model.path={warm}",
        f"data.path={run_dir / run / 'train.jsonl'}",
        f"worker.count={workers}",
    ]
    return load_config(demo_config(), overrides)


def demo_config() -> Path:
    """configs/demo.yaml of the checkout, or of the installed package."""
    for root in (Path(__file__).parents[1] / "configs", Path(sys.prefix) / "share/sluice/configs"):
        if (root / "demo.yaml").exists():
            return root / "demo.yaml"
    raise SluiceError("configs/demo.yaml is not installed; reinstall sluice")


def _newest_version(run_dir: Path) -> Path:
    return sorted((run_dir / "weights").glob("v??????"))[-1]


def _prune(runs: Path) -> None:
    for old in sorted(runs.glob("digits-*"))[: -(_KEEP_RUNS - 1)]:
        shutil.rmtree(old, ignore_errors=True)


def _summary(scores: dict[str, float], found: Audit, drill: Drill, pipeline_s: float, wall_s: float) -> dict[str, Any]:
    return {
        "f1_warm": round(scores["warm"], 4),
        "f1_final": round(scores["final"], 4),
        "enqueued": found.enqueued,
        "trained": found.trained,
        "dead": found.dead,
        "dropped": found.dropped,
        "lost": found.lost,
        "duplicated": found.duplicated,
        "worker_kills": drill.kills,
        "versions": found.versions,
        "pipeline_s": round(pipeline_s, 1),
        "wall_s": round(wall_s, 1),
    }


def _print(summary: dict[str, Any], page: Path) -> None:
    print(
        f"held-out F1 {summary['f1_warm']:.2f} → {summary['f1_final']:.2f} over {summary['versions']} weight versions\n"
        f"{summary['enqueued']} sequences enqueued = {summary['trained']} trained + {summary['dead']} dead "
        f"+ {summary['dropped']} dropped; {summary['lost']} lost, {summary['duplicated']} trained twice "
        f"({summary['worker_kills']} worker killed on the way)\n"
        f"pipeline {summary['pipeline_s']:.0f} s, in all {summary['wall_s']:.0f} s\n"
        f"report: {page}",
        file=sys.stderr,
    )
