"""How far a training loop has come, in files: what its weights hold, so that an ack that was cut off is made good.

    <run_dir>/<run>/weights/v000012/handoff.json   beside the weights of a version, and as durable: by `publish`
    <run_dir>/<run>/handoff.json                   of what was finished without a version since: by `done`

- The newer step of the two holds.
- The batches that a state names are acked after it is durable, and at the next start once more, which is harmless.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.errors import DataError, MessageError
from pipeline.files import write_atomic
from pipeline.weights.versions import newest_number, read_manifest
from pipeline.wire.codec import read_json

FILE = "handoff.json"
_RECENT_IDS = 8192


class HandoffState(msgspec.Struct, frozen=True, kw_only=True):
    """After `step` calls of publish or done."""

    step: int = 0
    samples: int = 0
    unacked: list[tuple[str, int]] = []  # (stream id, samples); their ack was perhaps not sent
    recent: list[str] = []  # newest sequence ids that were finished

    def after(self, unacked: list[tuple[str, int]], seq_ids: list[str]) -> HandoffState:
        """One step later, with these batches finished."""
        return HandoffState(
            step=self.step + 1,
            samples=self.samples + len(seq_ids),
            unacked=[*self.unacked, *unacked],
            recent=[*self.recent, *seq_ids][-_RECENT_IDS:],
        )

    def acked(self) -> HandoffState:
        """Nothing waits for its ack."""
        return msgspec.structs.replace(self, unacked=[])


def read_state(run_dir: Path) -> HandoffState:
    """The newest; raises DataError for a damaged file."""
    root = run_dir / "weights"
    newest = root / f"v{newest_number(root):06d}"
    return max((_read(newest), _read(run_dir)), key=lambda state: state.step)


def write_state(directory: Path, state: HandoffState) -> None:
    """Whole or not at all."""
    write_atomic(directory / FILE, msgspec.json.encode(state))


def _read(directory: Path) -> HandoffState:
    file = directory / FILE
    if not file.exists():  # the built-in trainer's version, or none
        return HandoffState(step=read_manifest(directory).step if (directory / "manifest.json").exists() else 0)
    try:
        return read_json(file.read_bytes(), HandoffState, FILE)
    except (OSError, MessageError) as error:
        raise DataError(f"{file}: cannot be read ({error}); restore it, or start a run of another name") from error
