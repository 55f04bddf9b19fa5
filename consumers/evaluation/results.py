"""The files of a run's evaluations: the answers of each, a line per version in evals.jsonl, and what follows from them.

The answers of a version are in a file of their own, a line per sequence, durable before the broker forgets it:

- The first line names the questions. If these change (other data, sampling, n), the evaluation starts over.
- A torn last line is cut: the broker still has that sequence. A sequence that is there twice counts once.
- Estimates have 95 % confidence intervals. The unit is the prompt: its answers are not independent of one another.
  Prompts are a sample of those one could ask.

evals.jsonl is the record; the best version and the stop are functions of it and of the configuration, so a run that is
started again with more patience goes on.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sluice.consumers.run_files import EVALS
from sluice.pipeline.config.types import EvalConfig
from sluice.pipeline.errors import ConfigError, MessageError
from sluice.pipeline.files import fsync_directory, write_atomic
from sluice.pipeline.logs import get_logger
from sluice.pipeline.status.evaluation import BEST, Best, Evaluation
from sluice.pipeline.telemetry import training_metrics
from sluice.pipeline.wire.codec import numbered, read_json

FOLDER = "evaluations"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence; `failed` is why it says nothing about the model, and then the rest is empty."""

    row: int  # place of its prompt among the held-out ones
    index: int  # among the prompt's answers
    text: str = ""  # of a rollout: that of its last turn
    transcript: str = ""  # of a rollout: all after its prompt, special tokens spelled out
    finish_reason: str = ""
    num_tokens: int = 0
    reward: float | None = None
    metrics: dict[str, float] = {}  # as of a sample: pipeline/telemetry/training_metrics.py
    failed: str = ""


class _Head(msgspec.Struct, frozen=True):
    version: int
    questions: str


class Answers:
    """Those of one version. Blocking."""

    def __init__(self, folder: Path, version: int, questions: str) -> None:
        """Read what is there. `questions`: digest of what is asked."""
        self.path = folder / f"v{version:06d}.jsonl"
        self.found: dict[tuple[int, int], Answer] = {}  # by row and index
        head = _Head(version, questions)
        if not self._read(head):
            write_atomic(self.path, msgspec.json.encode(head) + b"\n")
            fsync_directory(folder)

    def add(self, answers: Iterable[Answer]) -> None:
        """Append the new ones, durably."""
        new = {(one.row, one.index): one for one in answers if (one.row, one.index) not in self.found}
        if not new:
            return
        with self.path.open("ab") as stream:
            stream.write(b"".join(msgspec.json.encode(one) + b"\n" for one in new.values()))
            stream.flush()
            os.fsync(stream.fileno())
        self.found |= new

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _read(self, head: _Head) -> bool:
        """False if there is nothing to go on from."""
        if not self.path.exists():
            return False
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        first, *lines = whole.splitlines() or [b""]
        try:
            if read_json(first, _Head, "the first line") != head:
                get_logger().warning("the evaluation starts over: its questions have changed", file=str(self.path))
                return False
        except MessageError as error:
            get_logger().warning("the evaluation starts over", file=str(self.path), problem=str(error))
            return False
        for number, line in enumerate(lines, 2):
            try:
                one = read_json(line, Answer, "it")
            except MessageError as error:
                get_logger().warning("skipping an unreadable line", where=f"{self.path}:{number}", problem=str(error))
                continue
            self.found.setdefault((one.row, one.index), one)
        if len(whole) < len(raw):
            os.truncate(self.path, len(whole))
        return True


def read_answers(path: Path) -> list[Answer]:
    """Of one evaluation, by row and index; unreadable lines are left out."""
    found: dict[tuple[int, int], Answer] = {}
    for line in path.read_bytes().splitlines()[1:]:
        try:
            one = read_json(line, Answer, "it")
        except MessageError:  # it is being written
            continue
        found.setdefault((one.row, one.index), one)
    return [found[place] for place in sorted(found)]


def evaluations(folder: Path) -> list[tuple[int, Path]]:
    """The files by version, oldest first."""
    found = ((numbered(path.stem, "v"), path) for path in folder.glob("v*.jsonl"))
    return sorted((number, path) for number, path in found if number is not None)


def prune(folder: Path, keep: int | None, but: int) -> None:
    """Delete all but the newest `keep` files (None = all stay); that of version `but` stays."""
    if keep is None:
        return
    for version, path in evaluations(folder)[: -keep or None]:
        if version != but:
            path.unlink(missing_ok=True)


def summary(answers: Sequence[Answer], options: EvalConfig, seed: int) -> dict[str, float]:
    """The `eval/` metrics of one version, without the values that no answer has.

    A prompt with fewer than k answers left is not in pass@k; answers that failed are counted, and in nothing else.
    """
    whole = [one for one in answers if not one.failed]
    found: dict[str, float] = {}
    rewards = _by_prompt(whole, {(one.row, one.index): one.reward for one in whole if one.reward is not None})
    for k in options.k:
        enough = [given for given in rewards if len(given) >= k]
        right = [sum(reward > options.pass_above for reward in given) for given in enough]
        values = [pass_at_k(len(given), count, k) for given, count in zip(enough, right, strict=True)]
        found |= _with_interval(f"pass@{k}", values, seed)
    found |= _with_interval("reward_mean", [_mean(given) for given in rewards], seed)
    parts = sorted({name for one in whole for name in training_metrics.reward_parts(one.metrics)})
    for name in parts:
        key = f"{training_metrics.PARTS}{name}"
        scored = {(one.row, one.index): one.metrics[key] for one in whole if key in one.metrics}
        found |= _with_interval(key, [_mean(given) for given in _by_prompt(whole, scored)], seed)
    # `eval/` replaces `rollout/`: the same numbers, of other prompts.
    task = training_metrics.reduce([one.metrics for one in whole])
    found = {key.removeprefix("rollout/"): value for key, value in task.items()} | found
    counts = {
        "prompts": len({one.row for one in whole}),
        "sequences": len(whole),
        "failed": len(answers) - len(whole),
        "truncated_rate": _mean([float(one.finish_reason == "length") for one in whole]),
    }
    return {f"eval/{key}": float(value) for key, value in {**found, **counts}.items()}


def _by_prompt(answers: Sequence[Answer], values: dict[tuple[int, int], float]) -> list[list[float]]:
    """The values of each prompt that has some."""
    found: dict[int, list[float]] = defaultdict(list)
    for one in answers:
        if (one.row, one.index) in values:
            found[one.row].append(values[one.row, one.index])
    return list(found.values())


def _with_interval(name: str, values: Sequence[float], seed: int) -> dict[str, float]:
    if not values:
        return {}
    mean, low, high = interval(values, seed)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
_RESAMPLES = 2000
_AT_ONCE = 1 << 22  # drawn indices in memory


class Interval(NamedTuple):
    """A mean over prompts, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Probability that at least one of `k` answers is right, unbiased, from `num_answers` >= k of them.

    1 - C(n - c, k) / C(n, k), as a product: Chen et al., 2021 (Evaluating Large Language Models Trained on Code).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(2, 0, 1)
    (0.25, 1.0, 0.0)
    """
    if not 1 <= k <= num_answers or not 0 <= num_right <= num_answers:
        raise ValueError(f"pass@{k} of {num_right} right ones among {num_answers} answers")
    if num_answers - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / at for at in range(num_answers - num_right + 1, num_answers + 1))


def interval(values: Sequence[float], seed: int) -> Interval:
    """The mean of one value per prompt (at least one). Shares of yes and no: Wilson's; all else: the bootstrap's."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson(int(sum(values)), len(values))
    return bootstrap(values, seed)


def wilson(successes: int, total: int) -> Interval:
    """The score interval of a share: Wilson, 1927 (Probable inference, the law of succession, and statistical
    inference). Unlike the normal one it has a width where all or none succeeded.

    >>> [round(value, 4) for value in wilson(10, 10)]
    [1.0, 0.7225, 1.0]
    """
    share = successes / total
    below = 1 + _Z * _Z / total
    centre = (share + _Z * _Z / (2 * total)) / below
    half = _Z / below * math.sqrt(share * (1 - share) / total + _Z * _Z / (4 * total * total))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == total else min(1.0, centre + half)
    return Interval(share, low, high)


def bootstrap(values: Sequence[float], seed: int) -> Interval:
    """The percentile interval of a mean, from resampled prompts: Efron and Tibshirani, 1993 (An Introduction to the
    Bootstrap, ch. 13). The same values and seed give the same interval.
    """
    found = np.asarray(values, dtype=np.float64)
    draw, means = np.random.default_rng(seed), list[np.ndarray]()
    left, rows = _RESAMPLES, max(1, _AT_ONCE // len(found))
    while left > 0:
        count = min(left, rows)
        means.append(found[draw.integers(0, len(found), size=(count, len(found)))].mean(axis=1))
        left -= count
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(float(found.mean()), float(low), float(high))


_SHOWN = 12  # metrics in a message


class Result(msgspec.Struct, frozen=True):
    """One evaluated version."""

    version: int
    at: float  # Unix time
    values: dict[str, float]  # eval/…


class Results:
    """The evaluator's own lines of evals.jsonl; other programs may append theirs. Blocking."""

    def __init__(self, run_dir: Path, options: EvalConfig) -> None:
        """Raises ConfigError for a metric that no evaluation so far has, nor could have had."""
        self._dir, self._options = run_dir, options
        self._path = run_dir / EVALS
        self.all = _read(self._path)
        _check_metric(self.all, options)

    @property
    def versions(self) -> set[int]:
        return {one.version for one in self.all}

    @property
    def last(self) -> int | None:
        """The version that was evaluated last."""
        return self.all[-1].version if self.all else None

    def add(self, result: Result) -> None:
        """Append it, durably, unless its version is there.

        Raises ConfigError, and appends nothing, for a metric that no evaluation has, nor could have had.
        """
        if result.version in self.versions:
            return
        _check_metric([*self.all, result], self._options)
        line = msgspec.json.encode({"version": result.version, "at": result.at, **result.values}) + b"\n"
        self._dir.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as stream:
            if stream.tell() and (stream.seek(-1, os.SEEK_END), stream.read(1))[1] != b"\n":
                line = b"\n" + line  # what a killed writer left stays unreadable, alone
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        self.all.append(result)

    @property
    def _metric(self) -> str:
        """Decides which version is best, the same for all evaluations: the first wanted one that any of them has."""
        wanted = self._options.metric
        names = [wanted] if wanted else [f"pass@{self._options.k[0]}", "reward_mean", "f1"]
        return next((name for name in names if any(f"eval/{name}" in one.values for one in self.all)), names[0])

    def state(self) -> Evaluation:
        """What follows from the results, with nothing running."""
        options, metric = self._options, self._metric
        best: int | None = None
        highest: float | None = None
        since = 0
        for one in self.all:
            value = one.values.get(f"eval/{metric}")
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


def _check_metric(results: Sequence[Result], options: EvalConfig) -> None:
    """Raises ConfigError if some answers were scored, and none of them could have the metric."""
    measured = {
        key.removeprefix("eval/"): None for one in results if one.values.get("eval/sequences") for key in one.values
    }
    if options.metric is None or not measured or options.metric in measured:
        return
    if "reward_mean" in measured and options.metric in (f"pass@{k}" for k in options.k):
        return  # so far no prompt had k scored answers
    found = [name for name in measured if not name.endswith(("_low", "_high"))]
    raise ConfigError(
        f"eval.metric {options.metric!r} is none of what was measured ({', '.join(found[:_SHOWN])}, …); name one of "
        "those, or leave it out"
    )


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
