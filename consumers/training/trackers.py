"""Sends each optimiser step's record to TensorBoard, W&B and trackio, besides metrics.jsonl.

    Trainer ─ log(step, record) ─▶ a queue and a thread per tracker ─▶ the tracker

- Training never waits for a tracker: one that fails logs a single warning and gets nothing more; a slow one has
  `_CLOSE_S` at the end.
- A tracker is opened at the first step, by the trainer that makes it: a standby trainer opens none.
- The evaluator has trackers of its own, beside the trainer's: `tensorboard/eval`, and a run `NAME-eval`. Its steps are
  those that made the versions.
- A resumed trainer continues the same run. TensorBoard purges the steps that are redone; W&B and trackio
  can't, so they keep the first values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, DataError, MessageError, how_to_install
from sluice.pipeline.files import write_atomic
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.codec import read_json

_CLOSE_S, _NETWORK_S, _MOST_QUEUED = 15.0, 60.0, 10_000

Step = tuple[int, dict[str, float]]


class Sent(msgspec.Struct):
    """State of a tracker that can't purge steps: its run, and the last step sent."""

    id: str
    step: int = -1


def read_sent(path: Path) -> Sent:
    """The state of an earlier process, or of a new run. Raises DataError for a damaged file."""
    try:
        return read_json(path.read_bytes(), Sent, str(path)) if path.exists() else Sent(uuid4().hex[:8])
    except MessageError as error:
        raise DataError(f"{error}; delete the file to make the tracker start another run") from error


def _to_tensorboard(_: Config, directory: Path, part: str, steps: Iterator[Step]) -> None:
    """Event files in <run_dir>/<run>/tensorboard; the first step purges later events of an earlier process."""
    from torch.utils.tensorboard import SummaryWriter

    first = next(steps)
    with SummaryWriter(str(directory / "tensorboard" / part), purge_step=first[0]) as writer:
        for step, record in chain([first], steps):
            for key, value in record.items():
                writer.add_scalar(key, value, step)
            writer.flush()


def _wandb(tracker: Any, config: Config, directory: Path, run_id: str) -> dict[str, Any]:
    """With WANDB_MODE=offline the run is in <run_dir>/<run>/wandb."""
    limits = {"init_timeout": _NETWORK_S, "finish_timeout": _CLOSE_S}
    settings = tracker.Settings(console="off", silent=True, disable_git=True, **limits)
    return {"id": run_id, "name": config.run, "dir": str(directory), "settings": settings}


def _trackio(_: Any, config: Config, _directory: Path, run_id: str) -> dict[str, Any]:
    """The run is in TRACKIO_DIR."""
    return {"name": f"{config.run}-{run_id}"}


def _to_run(
    name: str,
    options: Callable[..., dict[str, Any]],
    log: dict[str, Any],
    config: Config,
    directory: Path,
    part: str,
    steps: Iterator[Step],
) -> None:
    """A run of a tracker that is opened with `options`, and logs each step with those of `log`."""
    path = directory / "tracking" / ("-".join(filter(None, (name, part))) + ".json")
    sent, tracker = read_sent(path), import_module(name)
    config = replace(config, run="-".join(filter(None, (config.run, part))))
    write_atomic(path, msgspec.json.encode(sent))
    run: Any = tracker.init(
        project=config.tracking.project, resume="allow", **options(tracker, config, directory, sent.id)
    )
    for step, record in steps:
        if step > sent.step:
            run.log(record, step=step, **log)
            sent.step = step
            write_atomic(path, msgspec.json.encode(sent))
    run.finish()


_TRACKERS: dict[str, Callable[[Config, Path, str, Iterator[Step]], None]] = {
    "tensorboard": _to_tensorboard,
    "wandb": partial(_to_run, "wandb", _wandb, {"commit": True}),  # otherwise it holds a step back until the next one
    "trackio": partial(_to_run, "trackio", _trackio, {}),
}
"""By key of `tracking`, which is also the package's name."""


class Trackers:
    """The configured trackers; entered and left by the trainer's role. Raises ConfigError.

    On exit it waits at most `close_s` for unwritten records.
    """

    def __init__(self, config: Config, close_s: float = _CLOSE_S, *, part: str = "") -> None:
        """`part`: whose records they are, if not the trainer's."""
        self._config, self._close_s, self._part = config, close_s, part
        self._fed: dict[str, tuple[Thread, SimpleQueue[Step | None]]] = {}  # without those that failed
        for name in _TRACKERS:
            if not getattr(config.tracking, name):
                continue
            if getattr(find_spec(name), "origin", None) is None:  # a folder in the working directory has none
                raise ConfigError(
                    f"tracking.{name} is true, but {name} is not installed: {how_to_install(name)}, or set it to false"
                )
            steps: SimpleQueue[Step | None] = SimpleQueue()
            self._fed[name] = Thread(target=self._feed, args=(name, steps), name=f"tracker-{name}", daemon=True), steps

    def log(self, step: int, record: dict[str, float]) -> None:
        """Returns at once: the trackers' threads do the work."""
        for name, (thread, steps) in list(self._fed.items()):
            steps.put((step, dict(record)))
            if thread.ident is None:
                thread.start()
            if steps.qsize() > _MOST_QUEUED:
                self._give_up(name, f"it is {_MOST_QUEUED} steps behind")

    def _feed(self, name: str, steps: SimpleQueue[Step | None]) -> None:
        try:
            directory = Path(self._config.run_dir) / self._config.run
            _TRACKERS[name](self._config, directory, self._part, iter(steps.get, None))
        except Exception as error:  # trackers may raise anything
            self._give_up(name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _give_up(self, name: str, cause: str) -> None:
        if self._fed.pop(name, None):
            get_logger().warning("tracking stopped; training continues", tracker=name, cause=cause)

    async def __aenter__(self) -> Trackers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(self._close(name, *fed) for name, fed in list(self._fed.items())))

    async def _close(self, name: str, thread: Thread, steps: SimpleQueue[Step | None]) -> None:
        steps.put(None)
        if thread.ident is not None:
            await asyncio.to_thread(thread.join, self._close_s)
        if thread.is_alive():
            self._give_up(name, f"it did not end within {self._close_s:.0f} s")
