"""Append-only JSON lines per optimiser step that agree with the checkpoint: a restart cuts what it will redo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class StepLog:
    """One file; each line has a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def cut_after(self, step: int) -> None:
        """Keep whole lines up to and with `step`."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_bytes().splitlines(keepends=True) if _step_of(line) <= step]
        aside = self.path.with_suffix(".tmp")
        aside.write_bytes(b"".join(kept))
        aside.replace(self.path)

    def append(self, step: int, **values: Any) -> None:
        """One line."""
        with self.path.open("ab") as stream:
            stream.write(msgspec.json.encode({"step": step, **values}) + b"\n")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """All lines of a step log; an empty list when there is none."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.strip()]


def _step_of(line: bytes) -> float:
    try:
        return float(msgspec.json.decode(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return float("inf")
