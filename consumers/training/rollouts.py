"""What was trained, step by step: `trainer.keep_rollouts` newest steps stay on disk, for audits and for people.

    <run_dir>/<run>/rollouts/step-000012.msgpack   TrainingBatch(batch_id="step-000012", samples=[as trained])

- A file is whole or absent, and written before the checkpoint of its step; a step that is redone replaces it.
- A resumed run keeps no file of a step that its checkpoint does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import DataError, MessageError
from pipeline.files import fsync_directory, write_atomic
from pipeline.wire.messages import TrainingBatch, TrainingSample, decode, encode


class Rollouts:
    """The files of one run; `keep` steps, 0 = none, None = all."""

    def __init__(self, directory: Path, keep: int | None) -> None:
        self._directory, self._keep = directory, keep

    def save(self, step: int, samples: Sequence[TrainingSample]) -> None:
        """Write one step's samples, and delete what is too old."""
        if self._keep == 0:
            return
        name = f"step-{step:06d}"
        path = self._directory / f"{name}.msgpack"
        write_atomic(path, encode(TrainingBatch(batch_id=name, samples=list(samples))))
        fsync_directory(self._directory)
        if self._keep is not None:
            for _, old in _files(self._directory)[: -self._keep]:
                old.unlink(missing_ok=True)

    def cut_after(self, step: int) -> None:
        """Delete the files of later steps: they will be redone, perhaps with other samples."""
        for number, path in _files(self._directory):
            if number > step:
                path.unlink(missing_ok=True)


def read_rollouts(directory: Path) -> Iterator[tuple[int, TrainingBatch]]:
    """(step, samples as trained) in order; raises DataError for a file that cannot be read."""
    for step, path in _files(directory):
        try:
            yield step, decode(TrainingBatch, path.read_bytes())
        except (OSError, MessageError) as error:
            raise DataError(f"{path}: cannot be read ({error}); delete it to go on without that step") from error


def _files(directory: Path) -> list[tuple[int, Path]]:
    """Oldest first; a number may outgrow its six digits."""
    found = ((path.stem.removeprefix("step-"), path) for path in directory.glob("step-*.msgpack"))
    return sorted((int(number), path) for number, path in found if number.isdecimal())
