"""`sluice demo`."""

from __future__ import annotations

from pathlib import Path


def demo(
    *,
    json: bool = False,
    seed: int = 0,
    workers: int = 2,
    kill: bool = True,
    dir: Path = Path(".sluice/demo"),
) -> int:
    """Train a tiny model on real handwritten digits, end to end, and show what happened.

    Warm-starts a small Qwen3 (cached), then runs producer, workers, consumer and trainer as processes on an
    embedded broker, kills one worker on the way, and writes an HTML report. `--json` prints one object at the end.

    Example: `sluice demo`, or `sluice demo --workers 3 --seed 7`
    """
    from demo.run import run_demo

    return run_demo(dir, seed=seed, workers=workers, kill=kill, as_json=json)
