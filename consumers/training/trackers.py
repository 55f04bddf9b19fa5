"""Sends each optimiser step's record to TensorBoard, W&B and trackio, besides metrics.jsonl.

    Trainer ─ log(step, record) ─▶ a queue and a thread per tracker ─▶ the tracker

- Training never waits for a tracker: one that fails logs a single warning and gets nothing more; a slow one has
  `_CLOSE_S` at the end.
- A tracker is opened at the first step, by the trainer that makes it: a standby trainer opens none.
- A resumed trainer continues the same run. TensorBoard purges the steps that are redone; W&B and trackio
  can't, so they keep the first values.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, DataError, MessageError
from sluice.pipeline.files import write_atomic
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.codec import read_json

_CLOSE_S = 15.0
_NETWORK_S = 60.0
_MOST_QUEUED = 10_000

Steps = Iterator[tuple[int, dict[str, float]]]


def _tensorboard(directory: Path, config: Config, steps: Steps) -> None:
    """Event files in <run_dir>/<run>/tensorboard; the first step purges later events of an earlier process."""
    from torch.utils.tensorboard import SummaryWriter

    first = next(steps)
    with SummaryWriter(str(directory / "tensorboard"), purge_step=first[0]) as writer:
        for step, record in chain([first], steps):
            for key, value in record.items():
                writer.add_scalar(key, value, step)
            writer.flush()


def _wandb(directory: Path, config: Config, steps: Steps) -> None:
    """W&B; with WANDB_MODE=offline it stays in <run_dir>/<run>/wandb."""
    import wandb

    settings = wandb.Settings(
        console="off", silent=True, disable_git=True, init_timeout=_NETWORK_S, finish_timeout=_CLOSE_S
    )
    run = {"project": config.tracking.project, "name": config.run, "dir": str(directory), "settings": settings}
    # Otherwise a step is held back until the next one.
    _remote("wandb", directory, steps, lambda key: wandb.init(id=key, resume="allow", **run), commit=True)


def _trackio(directory: Path, config: Config, steps: Steps) -> None:
    """trackio, stored in TRACKIO_DIR."""
    import trackio  # pyright: ignore[reportMissingImports]

    project, run = config.tracking.project, config.run
    _remote("trackio", directory, steps, lambda key: trackio.init(project=project, name=f"{run}-{key}", resume="allow"))


class Sent(msgspec.Struct):
    """State of a tracker that can't purge steps: its run, and the last step sent."""

    id: str
    step: int = 0


def read_sent(path: Path) -> Sent:
    """The state of an earlier process, or of a new run. Raises DataError for a damaged file."""
    try:
        return read_json(path.read_bytes(), Sent, str(path)) if path.exists() else Sent(uuid4().hex[:8])
    except MessageError as error:
        raise DataError(f"{error}; delete the file to make the tracker start another run") from error


def _remote(name: str, directory: Path, steps: Steps, begin: Callable[[str], Any], **how: Any) -> None:
    path = directory / "tracking" / f"{name}.json"
    sent = read_sent(path)
    write_atomic(path, msgspec.json.encode(sent))
    run = begin(sent.id)
    for step, record in steps:
        if step > sent.step:
            run.log(record, step=step, **how)
            sent.step = step
            write_atomic(path, msgspec.json.encode(sent))
    run.finish()


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


class _Feeder(threading.Thread):
    """Feeds one tracker; any exception from the tracker ends it."""

    def __init__(self, name: str, follow: Callable[[Steps], None]) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self._tracker, self._follow, self._failed = name, follow, False
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()

    def log(self, step: int, record: dict[str, float]) -> None:
        if self._queue.qsize() >= _MOST_QUEUED:
            self._give_up(f"it is {_MOST_QUEUED} steps behind")
        if not self._failed:
            self._queue.put((step, record))
            if self.ident is None:
                self.start()

    def close(self, deadline_s: float) -> None:
        if self.ident is not None and not self._failed:
            self._queue.put(None)
            self.join(deadline_s)
            if self.is_alive():
                self._give_up(f"it did not end within {deadline_s:.0f} s")

    def run(self) -> None:
        try:
            self._follow(iter(self._queue.get, None))
        except Exception as error:  # trackers may raise anything
            self._give_up(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _give_up(self, cause: str) -> None:
        if not self._failed:
            self._failed = True
            get_logger().warning("tracking stopped; training continues", tracker=self._tracker, cause=cause)


class Trackers:
    """The configured trackers; entered and left by the trainer's role. Raises ConfigError.

    On exit it waits at most `close_s` for unwritten records.
    """

    def __init__(self, config: Config, close_s: float = _CLOSE_S) -> None:
        self._close_s, directory = close_s, Path(config.run_dir) / config.run
        wanted = {name: follow for name, follow in _TRACKERS.items() if getattr(config.tracking, name)}
        for name in wanted:
            found = find_spec(name)
            if found is None or found.origin is None:  # no origin: a folder with that name in the working directory
                raise ConfigError(
                    f"tracking.{name} is true, but {name} is not installed: pip install 'sluice[{name}]', "
                    "or set it to false"
                )
        self._feeders = [_Feeder(name, partial(follow, directory, config)) for name, follow in wanted.items()]

    def log(self, step: int, record: dict[str, float]) -> None:
        """Returns at once: the trackers' threads do the work."""
        for feeder in self._feeders:
            feeder.log(step, dict(record))

    async def __aenter__(self) -> Trackers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(asyncio.to_thread(feeder.close, self._close_s) for feeder in self._feeders))
