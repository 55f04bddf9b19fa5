"""The results of a run's evaluations: a line per version in evals.jsonl, and what follows from them.

The file is the record; the best version and the stop are functions of it and of the configuration, so a run that is
started again with more patience goes on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sluice.consumers.run_files import EVALS
from sluice.pipeline.config.types import EvalConfig
from sluice.pipeline.errors import ConfigError, MessageError
from sluice.pipeline.files import write_atomic
from sluice.pipeline.status.evaluation import BEST, Best, Evaluation
from sluice.pipeline.wire.codec import read_json

_SHOWN = 12  # metrics in a message


class Result(msgspec.Struct, frozen=True):
    """One evaluated version."""

    version: int
    at: float  # Unix time
    values: dict[str, float]  # eval/…


class Results:
    """The evaluator's own lines of evals.jsonl; other programs may append theirs. Blocking."""

    def __init__(self, run_dir: Path, options: EvalConfig) -> None:
        """Raises ConfigError for a metric that the evaluations so far don't have."""
        self._dir, self._options = run_dir, options
        self._path = run_dir / EVALS
        self.all = _read(self._path)
        for one in self.all:
            self.value_of(one.values)

    @property
    def versions(self) -> set[int]:
        return {one.version for one in self.all}

    @property
    def last(self) -> int | None:
        """The version that was evaluated last."""
        return self.all[-1].version if self.all else None

    def add(self, result: Result) -> None:
        """Append it, durably, unless its version is there."""
        if result.version in self.versions:
            return
        line = msgspec.json.encode({"version": result.version, "at": result.at, **result.values}) + b"\n"
        self._dir.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as stream:
            if stream.tell() and (stream.seek(-1, os.SEEK_END), stream.read(1))[1] != b"\n":
                line = b"\n" + line  # what a killed writer left stays unreadable, alone
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        self.all.append(result)

    def value_of(self, values: Mapping[str, float]) -> tuple[str, float | None]:
        """The metric that decides, and its value; None if no answer of that evaluation has it."""
        wanted = self._options.metric
        names = [wanted] if wanted else [f"pass@{self._options.k[0]}", "reward_mean", "f1"]
        for name in names:
            if f"eval/{name}" in values:
                return name, values[f"eval/{name}"]
        if wanted and values.get("eval/sequences"):
            found = [key.removeprefix("eval/") for key in values if not key.endswith(("_low", "_high"))]
            raise ConfigError(
                f"eval.metric {wanted!r} is none of what was measured ({', '.join(found[:_SHOWN])}, …); name one of "
                "those, or leave it out"
            )
        return names[0], None

    def state(self) -> Evaluation:
        """What follows from the results, with nothing running."""
        options, metric = self._options, ""
        best: int | None = None
        highest: float | None = None
        since = 0
        for one in self.all:
            metric, value = self.value_of(one.values)
            if value is not None and (highest is None or value > highest + options.min_delta):
                best, highest, since = one.version, value, 0
            else:
                since += 1
        stops = ""
        if options.patience is not None and since >= options.patience and best is not None:
            stops = (
                f"eval/{metric} has not risen above {highest:.4g} (v{best}) in {since} evaluations "
                f"(eval.patience {options.patience})"
            )
        return Evaluation(
            evaluations=len(self.all),
            version=self.last,
            values=self.all[-1].values if self.all else {},
            metric=metric,
            best=best,
            best_value=highest,
            keeps_best=options.keep_best,
            since_best=since,
            stops=stops,
        )

    def store_best(self, now: Evaluation) -> None:
        """best.json, as long as a version is kept as the best one."""
        path = self._dir / BEST
        if now.best is None or now.best_value is None or not now.keeps_best:
            path.unlink(missing_ok=True)
            return
        where = self._dir / "weights" / f"v{now.best:06d}"
        best = Best(version=now.best, metric=f"eval/{now.metric}", value=now.best_value, path=str(where))
        write_atomic(path, msgspec.json.format(msgspec.json.encode(best)))


def _read(path: Path) -> list[Result]:
    found: dict[int, Result] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = read_json(line, dict[str, Any], "it")
            one = Result(int(row["version"]), float(row["at"]), _numbers(row))
        except (MessageError, KeyError, TypeError, ValueError):
            continue
        if one.values:
            found.setdefault(one.version, one)
    return list(found.values())


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if key.startswith("eval/")}
