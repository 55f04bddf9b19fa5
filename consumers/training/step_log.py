"""The record that each optimiser step leaves for people.

    metrics.jsonl, trained.jsonl                                  a line per step; ids that a loop's own checkpoint
                                                                  held have one more
    rollouts/step-000012.msgpack                                  TrainingBatch, the samples as trained;
                                                                  the newest `trainer.keep_rollouts` steps
    history, trackers, the numbers in `sluice status`

- Written before their step is durable; a restart cuts what it will redo, so nothing is missing.
- A rollouts file is complete or absent; a redone step replaces it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from sluice.consumers.history.recorder import TrainedRecorder
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.errors import DataError, MessageError
from sluice.pipeline.files import fsync_directory, write_atomic
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.trained import LEDGER, TrainedIds
from sluice.pipeline.run.role import Role
from sluice.pipeline.telemetry.spans import step_ref
from sluice.pipeline.wire.codec import read_json
from sluice.pipeline.wire.messages import DeadLetter, TrainingBatch, TrainingSample, decode, encode


class StepLog:
    """One file; each line has a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def cut_after(self, step: int) -> None:
        """Cut everything after the last complete line of `step` or earlier; damaged lines before it stay."""
        if not self.path.exists():
            return
        size = kept = 0
        with self.path.open("rb") as stream:
            for line in stream:
                size += len(line)
                if _step_of(line) <= step:
                    kept = size
        if kept < size:
            os.truncate(self.path, kept)

    def append(self, step: int, **values: Any) -> None:
        with self.path.open("ab") as stream:
            stream.write(msgspec.json.encode({"step": step, **values}) + b"\n")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """All readable lines of a step log; empty if there is no file."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                read_json(line, _Step, "it")
                found.append(read_json(line, dict[str, Any], "it"))
        except MessageError as error:
            get_logger().warning("skipping an unreadable line", where=f"{path}:{number}", problem=str(error))
    return found


class _Step(msgspec.Struct):
    step: int


def _step_of(line: bytes) -> float:
    try:
        return read_json(line, _Step, "it").step if line.endswith(b"\n") else float("inf")
    except MessageError:
        return float("inf")


class KeptRollouts:
    """The rollouts files of one run; `keep` steps, 0 = none, None = all."""

    def __init__(self, directory: Path, keep: int | None) -> None:
        self._directory, self._keep = directory, keep

    def save(self, step: int, samples: Sequence[TrainingSample], fence: Callable[[], None] = lambda: None) -> None:
        """Write one step's samples, and delete files that are too old; `fence` as in `write_atomic`."""
        if self._keep == 0:
            return
        name = f"step-{step:06d}"
        path = self._directory / f"{name}.msgpack"
        write_atomic(path, encode(TrainingBatch(batch_id=name, samples=list(samples))), fence=fence)
        fsync_directory(self._directory)
        if self._keep is not None:
            for _, old in _rollout_files(self._directory)[: -self._keep]:
                old.unlink(missing_ok=True)

    def cut_after(self, step: int) -> None:
        """Delete the files of later steps: they will be redone, perhaps with other samples."""
        for number, path in _rollout_files(self._directory):
            if number > step:
                path.unlink(missing_ok=True)


def read_rollouts(directory: Path) -> Iterator[tuple[int, TrainingBatch]]:
    """(step, samples as trained) in order; raises DataError for an unreadable file."""
    for step, path in _rollout_files(directory):
        try:
            yield step, decode(TrainingBatch, path.read_bytes())
        except (OSError, MessageError) as error:
            raise DataError(f"{path}: cannot be read ({error}); delete it to continue without that step") from error


def _rollout_files(directory: Path) -> list[tuple[int, Path]]:
    """Oldest first; a number may outgrow six digits."""
    found = ((path.stem.removeprefix("step-"), path) for path in directory.glob("step-*.msgpack"))
    return sorted((int(number), path) for number, path in found if number.isdecimal())


class StepRecords:
    """All records of one trainer."""

    def __init__(self, role: Role, trackers: Trackers, run_dir: Path) -> None:
        self._role, self._trackers = role, trackers
        self._metrics, self._trained = StepLog(run_dir / "metrics.jsonl"), StepLog(run_dir / LEDGER)
        self.known = TrainedIds(run_dir)
        self._kept = KeptRollouts(run_dir / "rollouts", role.config.trainer.keep_rollouts)
        self._history = TrainedRecorder(role.config)
        self._written = 0

    def resume(self, step: int, recent: Iterable[str] = ()) -> None:
        """Cut records of later steps: they never became durable. `recent`: ids known to be trained."""
        for kept in (self._metrics, self._trained, self._kept):
            kept.cut_after(step)
        self.known.open(step, recent)
        self._history.forget()

    def write(
        self,
        step: int,
        version: int,
        samples: Sequence[TrainingSample],
        values: Mapping[str, float],
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the files of one step from weights of `version`, before it is durable.

        `fence` is called before whatever changes a file, and may raise to prevent it.
        """
        if self._written == step:  # an earlier attempt failed
            fence()
            self.resume(step - 1)
        self._written = step
        self._kept.save(step, samples, fence)
        fence()
        self._metrics.append(step, version=version, at=time.time(), **values)
        seq_ids = [sample.seq_id for sample in samples]
        self._trained.append(step, seq_ids=seq_ids)
        self.known.add(step, seq_ids)

    def adopt(self, step: int, seq_ids: Sequence[str]) -> None:
        """Record as trained what the caller's own checkpoint holds; `step` is the newest one."""
        if self._written > step:  # the lines of an attempt that failed: later ones would hide them from the next cut
            self.resume(step)
            self._written = step
        self._trained.append(step, seq_ids=list(seq_ids))
        self.known.add(step, seq_ids)

    def note(
        self,
        step: int,
        version: int,
        samples: Sequence[TrainingSample],
        letters: Sequence[DeadLetter],
        handed_at: Mapping[str, float] = {},
    ) -> None:
        """For the history: what a step trains, and what was dropped before it; `flush` writes it."""
        self._history.note(step, version, samples, letters, handed_at)

    async def show(self, step: int, values: Mapping[str, float]) -> None:
        """Send to trackers, telemetry and the status."""
        self._trackers.log(step, dict(values))
        trace = step_ref(self._role.config.run, step).carrier() if self._role.tracing.enabled else {}
        self._role.telemetry.observe(trace, sluice_train_step_seconds=values["train/step_s"])
        line = msgspec.json.encode(values).decode()
        await cast("Awaitable[bool]", self._role.client.set(self._role.keys.metrics, line))

    async def flush(self) -> None:
        """Write the history; called before the ack, so nothing is missing from it."""
        await self._history.flush()

    async def close(self) -> None:
        await self._history.close()
        self.known.close()
