"""`sluice demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sluice.pipeline.errors import ConfigError


def demo(
    *,
    task: str = "pictures",
    json: Annotated[bool, Parameter(negative="")] = False,
    prompts: int | None = None,
    seed: int = 0,
    workers: int = 2,
    kill: bool = True,
    dir: Path = Path(".sluice/demo"),
) -> int:
    """Train a tiny model end to end, and report the results.

    Warm-starts a small Qwen3-VL, or a Qwen3 (cached), then runs producer, workers, consumer and trainer as processes on
    an embedded broker, kills one worker during the run, and writes an HTML report.

    Example: `sluice demo`
    Example: `sluice demo --task arithmetic --workers 3 --seed 7`

    Parameters
    ----------
    task
        `pictures`: read handwritten digits in PNG files, teacher-forced on matched targets; the vision tower learns
        as well. `digits`: such scenes as text, for a model without a vision tower. `arithmetic`: sums in steps, learnt
        from rewards with a policy loss, while new weights land in the middle of running sequences. `tools`: sums with
        a calculator, learnt in rollouts of several turns, through the rollout server and the gateway.
    json
        One JSON object with the counts and scores at the end.
    prompts
        Prompts to train on; fewer make a shorter run. Without it, as many as the task's configuration says.
    seed
        Seed of the training data and of sampling.
    workers
        Decode workers.
    kill
        Kill one worker with SIGKILL during the run; needs two workers.
    dir
        Directory for the cached warm start and the runs.
    """
    from sluice.demo.run import Options, run_demo
    from sluice.demo.tasks import load_task

    if prompts is not None and prompts < 1:
        raise ConfigError(f"--prompts: must be at least 1, got {prompts}")
    options = Options(seed=seed, workers=workers, prompts=prompts, kill=kill)
    return run_demo(load_task(task), dir, options, as_json=json)
