"""Append-only JSON lines per optimiser step that agree with the checkpoint: a restart cuts what it will redo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import MessageError
from pipeline.logs import get_logger
from pipeline.wire.codec import read_json


class StepLog:
    """One file; each line has a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def cut_after(self, step: int) -> None:
        """Cut what lies behind the last whole line of `step` or earlier; damage before it keeps its place."""
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
        """One line."""
        with self.path.open("ab") as stream:
            stream.write(msgspec.json.encode({"step": step, **values}) + b"\n")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """All lines of a step log that can be read; an empty list when there is none."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                read_json(line, _Step, "it")
                found.append(read_json(line, dict[str, Any], "it"))
        except MessageError as error:
            get_logger().warning("a line cannot be read and is skipped", where=f"{path}:{number}", problem=str(error))
    return found


class _Step(msgspec.Struct):
    step: int


def _step_of(line: bytes) -> float:
    try:
        return read_json(line, _Step, "it").step if line.endswith(b"\n") else float("inf")
    except MessageError:
        return float("inf")
