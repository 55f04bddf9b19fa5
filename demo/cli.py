"""`sluice demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def demo(
    *,
    task: str = "digits",
    json: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    workers: int = 2,
    kill: bool = True,
    dir: Path = Path(".sluice/demo"),
) -> int:
    """Train a tiny model end to end, and report the results.

    Warm-starts a small Qwen3 or Qwen3-VL (cached), then runs producer, workers, consumer and trainer as processes on an
    embedded broker, kills one worker during the run, and writes an HTML report.

    Example: `sluice demo`
    Example: `sluice demo --task arithmetic --workers 3 --seed 7`

    Parameters
    ----------
    task
        `digits`: read handwritten digits, teacher-forced on matched targets. `pictures`: the same from PNG files, with
        a vision tower that learns too. `arithmetic`: sums in steps, learnt from rewards with a policy loss, while new
        weights land in the middle of running sequences. `tools`: sums with a calculator, learnt in rollouts of several
        turns, through the rollout server and the gateway.
    json
        One JSON object with the counts and scores at the end.
    seed
        Seed of the training data and of sampling.
    workers
        Decode workers.
    kill
        Kill one worker with SIGKILL during the run; needs two workers.
    dir
        Directory for the cached warm start and the runs.
    """
    from sluice.demo.run import run_demo
    from sluice.demo.tasks import load_task

    return run_demo(load_task(task), dir, seed=seed, workers=workers, kill=kill, as_json=json)
