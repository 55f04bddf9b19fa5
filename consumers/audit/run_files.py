"""Where a run keeps what is audited."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

import msgspec

from pipeline.config import Config, load_config
from pipeline.errors import ConfigError, DataError, MessageError
from pipeline.wire.codec import read_json

ROLLOUTS, WEIGHTS, HISTORY = "rollouts", "weights", "history"
RESOLVED, METRICS = "config.resolved.yaml", "metrics.jsonl"


def find_run(run: str, config: Config) -> Path:
    """The directory of a run, given as a path or as a name under `config.run_dir`; raises DataError."""
    given, named = Path(run), Path(config.run_dir) / run
    found = next((path for path in (given, named) if _is_run(path)), None)
    if found is None:
        raise DataError(
            f"no run {run!r}: neither {given} nor {named} is a run's directory; give the directory, or its name "
            "and where runs are (-c CONFIG or --set run_dir=DIR)"
        )
    return found


def stored_config(directory: Path, given: Config, overrides: Sequence[str]) -> Config:
    """The configuration that the run was made with, `--set` on top; `given` where none was stored."""
    file = directory / RESOLVED
    return load_config(file, overrides, environ={}) if file.is_file() else given


class _Step(msgspec.Struct):
    step: int
    version: int | None = None


def trained_versions(directory: Path) -> dict[int, int]:
    """The version of the weights that each step trained, by step; raises DataError for a damaged metrics.jsonl."""
    file = directory / METRICS
    if not file.is_file():
        return {}
    # A last line without its end is being written.
    whole = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n") and line.strip()]
    try:
        steps = [read_json(line, _Step, f"line {number}") for number, line in enumerate(whole, 1)]
    except MessageError as error:
        raise DataError(f"{file}: cannot be read ({error}); delete the damaged lines to go on without them") from error
    return {each.step: each.version for each in steps if each.version is not None}


def step_bounds(steps: str | None) -> tuple[float, float]:
    """`7`, `3:10`, `3:` or `:10`, both ends included; None: all. Raises ConfigError."""
    first, colon, last = (steps or ":").partition(":")
    try:
        low = int(first) if first else 0
        return low, (int(last) if last else inf) if colon else int(first)
    except ValueError as error:
        raise ConfigError(f"--steps {steps!r}: write one step (7) or a range of them (3:10, 3: or :10)") from error


def _is_run(path: Path) -> bool:
    return any((path / part).exists() for part in (ROLLOUTS, WEIGHTS, RESOLVED))
