"""Where the files of a run are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sluice.pipeline.config import Config, load_config
from sluice.pipeline.config.load import RESOLVED
from sluice.pipeline.errors import DataError

ROLLOUTS, WEIGHTS, HISTORY = "rollouts", "weights", "history"
METRICS = "metrics.jsonl"
EVALS = "evals.jsonl"


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
    """The configuration that the run used, with `--set` applied; `given` if none was stored."""
    file = directory / RESOLVED
    return load_config(file, overrides, environ={}) if file.is_file() else given


def _is_run(path: Path) -> bool:
    return any((path / part).exists() for part in (ROLLOUTS, WEIGHTS, RESOLVED))
