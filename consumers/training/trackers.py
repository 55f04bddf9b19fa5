"""The record of each optimiser step to TensorBoard, W&B and trackio, besides metrics.jsonl.

    Trainer ─ log(step, record) ─▶ a queue and a thread per tracker ─▶ the tracker

- Training never waits for a tracker: one that fails is a warning, once, and gets nothing more; one that is slow has
  `_CLOSE_S` at the end.
- A tracker is opened at the first step, by the trainer that makes it: one that stands by opens none.
- A resumed trainer goes on in the same run. TensorBoard takes back the steps that are made again; W&B and trackio
  cannot, so that what they have of those steps stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
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

Record = dict[str, float]


class Tracker(Protocol):
    """Used by one thread alone; what it raises ends it."""

    def log(self, step: int, record: Record) -> None:
        """One optimiser step; steps rise, but for those that a resumed trainer makes again."""
        ...

    def close(self) -> None:
        """All of it is written."""
        ...


class TensorBoard:
    """Event files in <run_dir>/<run>/tensorboard."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._writer = directory / "tensorboard", None

    def log(self, step: int, record: Record) -> None:
        """The first one takes back what an earlier process wrote of it and of later steps."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        for key, value in record.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """The last event."""
        if self._writer is not None:
            self._writer.close()


class _Sent(msgspec.Struct):
    """What a tracker that cannot take back a step has: its run, and the last step of it."""

    id: str
    step: int = 0


class _Remote:
    """A run of W&B or of trackio; <run_dir>/<run>/tracking/<tracker>.json says which, and how far it is."""

    def __init__(self, name: str, directory: Path, begin: Callable[[str], Any]) -> None:
        self._path = directory / "tracking" / f"{name}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._sent = _Sent(id=uuid4().hex[:8])
        if self._path.exists():
            try:
                self._sent = read_json(self._path.read_bytes(), _Sent, str(self._path))
            except MessageError as error:
                raise DataError(f"{error}; delete the file, and the tracker begins another run") from error
        self._save()
        self._run = begin(self._sent.id)

    def log(self, step: int, record: Record) -> None:
        """Nothing for a step that it has."""
        if step > self._sent.step:
            self._send(step, record)
            self._sent.step = step
            self._save()

    def _send(self, step: int, record: Record) -> None:
        self._run.log(record, step=step)

    def close(self) -> None:
        """The rest is sent."""
        self._run.finish()

    def _save(self) -> None:
        write_atomic(self._path, msgspec.json.encode(self._sent))


class WandB(_Remote):
    """W&B; WANDB_MODE=offline keeps it in <run_dir>/<run>/wandb."""

    def __init__(self, directory: Path, project: str, run: str) -> None:
        def begin(identity: str) -> Any:
            import wandb

            settings = wandb.Settings(
                console="off", silent=True, disable_git=True, init_timeout=_NETWORK_S, finish_timeout=_CLOSE_S
            )
            return wandb.init(
                project=project, name=run, id=identity, resume="allow", dir=str(directory), settings=settings
            )

        super().__init__("wandb", directory, begin)

    def _send(self, step: int, record: Record) -> None:
        self._run.log(record, step=step, commit=True)  # a step is otherwise held back until the next one


class Trackio(_Remote):
    """trackio, which keeps it where TRACKIO_DIR says."""

    def __init__(self, directory: Path, project: str, run: str) -> None:
        def begin(identity: str) -> Any:
            import trackio  # pyright: ignore[reportMissingImports]

            return trackio.init(project=project, name=f"{run}-{identity}", resume="allow")

        super().__init__("trackio", directory, begin)


class _Feeder:
    """One tracker, in a thread of its own."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name, self._make, self._failed = name, make, False
        self._queue: queue.Queue[tuple[int, Record] | None] = queue.Queue(_MOST_QUEUED)
        self._thread: threading.Thread | None = None

    def log(self, step: int, record: Record) -> None:
        if self._failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, name=f"tracker-{self._name}", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((step, record))
        except queue.Full:
            self._give_up(f"it is {_MOST_QUEUED} steps behind")

    def close(self, deadline_s: float) -> None:
        if self._thread is None or self._failed:
            return
        until = time.monotonic() + deadline_s
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=deadline_s)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it did not end within {deadline_s:.0f} s")

    def _feed(self) -> None:
        try:
            tracker = self._make()
            while (entry := self._queue.get()) is not None:
                tracker.log(*entry)
            tracker.close()
        except Exception as error:  # a tracker's own, whatever it is
            self._give_up(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _give_up(self, cause: str) -> None:
        if self._failed:
            return
        self._failed = True
        get_logger().warning("tracking ended; training goes on", tracker=self._name, cause=cause)


class Trackers:
    """Those that the configuration names; entered and left by the trainer's role. Raises ConfigError.

    At its end it waits `close_s` at most for what they have not written.
    """

    def __init__(self, config: Config, close_s: float = _CLOSE_S) -> None:
        self._close_s = close_s
        tracking, directory, run = config.tracking, Path(config.run_dir) / config.run, config.run
        makers: dict[str, Callable[[], Tracker]] = {
            "tensorboard": lambda: TensorBoard(directory),
            "wandb": lambda: WandB(directory, tracking.project, run),
            "trackio": lambda: Trackio(directory, tracking.project, run),
        }
        wanted = [name for name in makers if getattr(tracking, name)]
        for name in wanted:
            _check(name)
        self._feeders = [_Feeder(name, makers[name]) for name in wanted]

    def log(self, step: int, record: Record) -> None:
        """At once: the trackers' own threads do the rest."""
        for feeder in self._feeders:
            feeder.log(step, dict(record))

    async def __aenter__(self) -> Trackers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(asyncio.to_thread(feeder.close, self._close_s) for feeder in self._feeders))


def _check(name: str) -> None:
    found = find_spec(name)
    if found is None or found.origin is None:  # no origin: a folder of that name in the working directory
        raise ConfigError(
            f"tracking.{name} is true and {name} is not installed: pip install 'sluice[{name}]', or set it to false"
        )
