"""Held-out score of weight versions, decoded greedily by the pipeline's engine.

As a process (`python -m sluice.demo.evaluator TASK VERSIONS_DIR OUT.jsonl COUNT SEED`) it follows a run that has no
`eval.data`, one of rollouts: it scores each newest version, at low priority. Held-out problems are generated here; no
other process ever sees them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.demo.answers import FILE, SHOWN, Answers, keep
from sluice.demo.tasks import DemoTask, load_task
from sluice.pipeline.errors import WeightsError
from sluice.workers.engine.generation_engine import GenerationEngine
from sluice.workers.engine.requests import (
    GenerationOptions,
    ModelLoadConfig,
    TextGenerationRequest,
    VlmGenerationRequest,
)

_EVERY_S = 3.0  # leaves CPU cores to the pipeline


def decode(task: DemoTask, model_dir: Path, chosen: Sequence[Any]) -> Sequence[Any]:
    """Greedy answers of the model in a directory: texts, or the task's own answer type."""
    if task.answers is not None:
        return task.answers(model_dir, chosen)
    model = ModelLoadConfig(model_name_or_path=str(model_dir))
    options = GenerationOptions(max_new_tokens=task.max_new_tokens)
    with GenerationEngine(model, max_batch=64) as engine:
        if task.images is None:
            texts = [TextGenerationRequest(messages=task.messages(one)) for one in chosen]
            results = engine.generate_text_batch(texts, options)
        else:
            seen = [VlmGenerationRequest(messages=task.messages(one), images=task.images(one)) for one in chosen]
            results = engine.generate_vlm_batch(seen, options)
    return [result.text for result in results]


def follow(task: DemoTask, versions: Path, out: Path, chosen: Sequence[Any]) -> None:
    """Score the newest version whenever it hasn't been scored yet; never returns."""
    measured, started = -1, -_EVERY_S
    while True:
        found = sorted(versions.glob("v??????"))
        newest = int(found[-1].name[1:]) if found else -1
        if newest <= measured or time.monotonic() - started < _EVERY_S:
            time.sleep(0.2)
            continue
        started = time.monotonic()
        # A version may be retired during the read; the next one exists by then.
        with contextlib.suppress(FileNotFoundError, WeightsError, OSError):
            record(task, out, newest, time.time(), chosen, decode(task, found[-1], chosen))
        measured = newest


def record(task: DemoTask, out: Path, version: int, at: float, chosen: Sequence[Any], answers: Sequence[Any]) -> None:
    """Append the score to `out`, and what the report shows of the first answers to the file beside it."""
    views = [task.answer_view(problem, one) for problem, one in zip(chosen[:SHOWN], answers[:SHOWN], strict=True)]
    keep(out.with_name(FILE), Answers(version, at, views))
    with out.open("a") as stream:
        stream.write(json.dumps({"version": version, "at": at, **task.score(answers, chosen)}) + "\n")


def main(arguments: list[str]) -> None:
    import torch

    # Not SystemExit: if raised inside a weakref callback it is lost, and this process would never exit.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.nice(5)
    torch.set_num_threads(1)
    name, versions, out, count, seed = arguments
    task = load_task(name)
    with contextlib.suppress(asyncio.CancelledError):
        follow(task, Path(versions), Path(out), task.heldout(int(count), int(seed)))


if __name__ == "__main__":
    main(sys.argv[1:])
