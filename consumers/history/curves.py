"""The curves of a run over steps and time, from its files alone: a run that is over has them too.

    metrics.jsonl, a line per step ────────────┐
    evals.jsonl, a line per held-out score ────┼─▶ RunCurves ─▶ Chart, Chart, … ─▶ overview, runs, /curves (JSON)
    history/index.sqlite, per step and version ┘

- A line of metrics.jsonl has a step, the version that the step started from, and its time. A held-out score or an
  ending belongs to a version; its step is the one that made the version.
- Files are read from where the last reading stopped; a file that was cut (a resumed trainer does so) is read again.
- Held-out scores: the run's evaluator (`eval.data`), or whatever appends `{"version": 3, "at": UNIX_TIME, "NAME":
  NUMBER}` to evals.jsonl in the run's directory. They are never mixed with those of the training rollouts.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sluice.consumers.history.index import HistoryIndex
from sluice.consumers.history.records import SequenceRow
from sluice.consumers.run_files import EVALS, METRICS
from sluice.pipeline.errors import MessageError
from sluice.pipeline.status.evaluation import headline
from sluice.pipeline.telemetry.training_metrics import PARTS
from sluice.pipeline.wire.codec import read_json

_ACRONYMS = {"f1": "F1", "iou": "IoU"}
MOST_POINTS = 400  # of a line
_STEPS = 20  # the newest ones, over which times are averaged
_WINDOW_S = 10.0  # over which tokens per second are counted
_MOST_LINES = 8  # of a chart
_ENDS = 0.1  # share of a line whose mean is its start, or its end


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Three lists of one length, by time."""

    name: str
    steps: list[float]
    at: list[float]  # Unix time
    values: list[float]
    colour: int = 0  # number of its colour


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One diagram; every line has at least one point."""

    key: str
    title: str
    unit: str
    about: str
    lines: list[Line]
    x: str = "step"  # what `steps` are


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """How a line moved from its start to its end, each the mean of a tenth of its points."""

    name: str
    first: float
    last: float


class _Plan(msgspec.Struct, frozen=True):
    """A chart of metrics.jsonl: which keys become which lines."""

    key: str
    title: str
    unit: str
    about: str
    names: dict[str, str]


_PLANS = (
    _Plan(
        "reward", "Reward", "mean of a step", "of the training rollouts, sampled",
        {"policy/reward_mean": "reward", "rollout/reward_mean": "reward"},
    ),
    _Plan(
        "rollouts", "Boxes of training rollouts", "share", "sampled, on the data that is trained on",
        {"rollout/f1": "F1", "rollout/precision": "precision", "rollout/recall": "recall"},
    ),
    _Plan(
        "loss", "Loss", "nats a token", "of the step",
        {"policy/loss": "policy loss", "train/loss": "cross-entropy", "train/geometry_loss": "geometry"},
    ),
    _Plan(
        "kl", "KL, k3", "nats a token", "how far the weights moved between sampling and training",
        {"policy/approx_kl": "proximal to trained", "policy/kl_reference": "trained to reference"},
    ),
    _Plan(
        "staleness", "Staleness", "versions", "of the sampled tokens when they were trained",
        {"policy/version_lag_mean": "mean", "policy/version_lag_max": "oldest"},
    ),
    _Plan(
        "length", "Length", "sampled tokens", "of the sequences of a step",
        {"rollout/gen_new_tokens_mean": "mean", "rollout/gen_new_tokens_p90": "90th percentile",
         "rollout/gen_new_tokens_p99": "99th percentile"},
    ),
)  # fmt: skip
_TOKENS = "rollout/gen_new_tokens_total"
_TIMES = ("train/score_s", "train/step_s", "train/publish_s")
_KEPT = frozenset({key for plan in _PLANS for key in plan.names} | {_TOKENS, *_TIMES})
_ORDER = ("reward", "heldout", "rollouts", "loss", "kl", "staleness", "length", "endings", "tokens")


class Step(msgspec.Struct, frozen=True):
    """A line of metrics.jsonl, with what is drawn of it."""

    step: int
    version: int
    at: float
    values: dict[str, float]


class Score(msgspec.Struct, frozen=True):
    """A line of evals.jsonl."""

    version: int
    at: float
    values: dict[str, float]


class LineFile:
    """The lines of a growing file that holds one JSON object a line; unreadable ones are left out."""

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], Any]) -> None:
        self.path, self.rows = path, list[Any]()
        self._keep, self._read, self._last = keep, 0, b""

    def refresh(self) -> bool:
        """Read what was added; True if anything changed."""
        try:
            size = self.path.stat().st_size
            if size == self._read:
                return False
            with self.path.open("rb") as stream:
                start = self._read - len(self._last)
                if size < self._read or (stream.seek(start), stream.read(len(self._last)))[1] != self._last:
                    self.rows, self._read, self._last = [], 0, b""  # it was cut, or replaced
                stream.seek(self._read)
                added = stream.read()
        except OSError:  # it isn't there, or can't be read
            return False
        whole = added[: added.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                row = self._keep(read_json(line, dict[str, Any], "it"))
            except (MessageError, KeyError, TypeError, ValueError):
                continue
            if row is not None:
                self.rows.append(row)
        if whole:
            self._read += len(whole)
            self._last = whole.splitlines(keepends=True)[-1]
        return bool(whole)


def _step(line: dict[str, Any]) -> Step:
    values = {key: number for key, number in _numbers(line).items() if key in _KEPT or key.startswith(PARTS)}
    return Step(int(line["step"]), int(line["version"]), float(line["at"]), values)


def score_of(line: dict[str, Any]) -> Score:
    """Of a line of evals.jsonl. Raises KeyError, TypeError, ValueError without its version or time."""
    values = {key: number for key, number in _numbers(line).items() if key not in ("version", "at", "step")}
    return Score(int(line["version"]), float(line["at"]), values)


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class RunCurves:
    """The curves of one run's directory. Blocking; thread-safe."""

    def __init__(self, directory: Path, index: HistoryIndex | None = None) -> None:
        self.directory, self._index = directory, index
        self._steps, self._scores = LineFile(directory / METRICS, _step), LineFile(directory / EVALS, score_of)
        self._lock = threading.Lock()
        self.drawn: list[Chart] = []  # as of the last `charts`
        self._stamp: object = None

    def close(self) -> None:
        """Close its index."""
        if self._index is not None:
            self._index.close()

    def charts(self) -> list[Chart]:
        """The ones with data, in order of interest. Raises DataError if its index can't be read."""
        with self._lock:
            stamp = self._index.stamp() if self._index else 0
            changed = [self._steps.refresh(), self._scores.refresh()]
            if any(changed) or stamp != self._stamp:
                self._stamp = None  # until it is drawn
                self.drawn = self._draw()
                self._stamp = stamp
            return self.drawn

    @property
    def newest(self) -> Step | None:
        """The newest step, as of the last `charts`."""
        return self._steps.rows[-1] if self._steps.rows else None

    @property
    def ends(self) -> tuple[Step | None, Step | None]:
        """The first and the newest step, as of the last `charts`."""
        return (self._steps.rows[0], self._steps.rows[-1]) if self._steps.rows else (None, None)

    def times(self, rows: Sequence[SequenceRow]) -> list[tuple[str, float]]:
        """Mean seconds of these sequences, and of the newest steps, by what the time was spent on; empty if unknown."""
        rows = [row for row in rows if row.version_max >= 0 and row.decode_s > 0]
        recent: list[Step] = self._steps.rows[-_STEPS:]
        began = {step.step: step.at - sum(step.values.get(key, 0.0) for key in _TIMES[:2]) for step in self._steps.rows}
        waits = [max(0.0, began[row.step] - row.at) for row in rows if row.step is not None and row.step in began]
        score, train, publish = (_average([one.values[key] for one in recent if key in one.values]) for key in _TIMES)
        found = [
            ("queue", _average([row.queue_s for row in rows])),
            ("decode", _average([row.decode_s for row in rows])),
            ("wait for a batch", _average(waits)),
            ("score", score),
            ("train", train),
            ("publish", publish),
        ]
        return [(name, seconds) for name, seconds in found if seconds > 0]

    def times_of_versions(self) -> dict[int, float]:
        """When the first step from each version was done, as of the last `charts`."""
        return {step.version: step.at for step in reversed(self._steps.rows)}

    def stages_of(self, version: int) -> list[tuple[str, float]]:
        """Seconds of what made a version, and until its first token; only what was measured."""
        steps: list[Step] = self._steps.rows
        at = bisect_left(steps, version, key=lambda step: step.version)
        before = steps[at - 1].version if 0 < at <= len(steps) else None
        own = [step.values for step in steps[:at] if step.version == before] if before is not None else []
        parts = zip(("score", "train"), _TIMES[:2], strict=True)
        found = [(name, math.fsum(one.get(key, 0.0) for one in own)) for name, key in parts]
        if at < len(steps) and steps[at].version == version:
            found.append(("publish", steps[at].values.get("train/publish_s", 0.0)))
        if self._index is not None:
            found.append(("first token", self._index.loads().get(version, 0.0)))
        return [(name, seconds) for name, seconds in found if seconds > 0]

    def change(self) -> Change | None:
        """How the line of most interest moved: a held-out score, else the reward, the training rollouts, the loss."""
        charts = {chart.key: chart for chart in self.drawn}
        for key in ("heldout", "reward", "rollouts", "loss"):
            if key in charts and len(values := charts[key].lines[0].values) > 1:
                count = 1 if key == "heldout" else max(1, int(len(values) * _ENDS))  # the others are noisy
                first, last = (math.fsum(part) / count for part in (values[:count], values[-count:]))
                title = charts[key].title if key != "loss" else charts[key].lines[0].name
                name = charts[key].lines[0].name if key == "heldout" else title
                return Change(name=f"held-out {name}" if key == "heldout" else name.lower(), first=first, last=last)
        return None

    def _draw(self) -> list[Chart]:
        found = {plan.key: self._metrics(plan) for plan in _PLANS}
        found["heldout"] = self._heldout()
        found["tokens"] = Chart(
            key="tokens",
            title="Throughput",
            unit="tokens/s",
            about="sampled tokens that were trained",
            lines=self._rate(),
        )
        if self._index is not None:
            self._add_history(found, self._index)
        return [_coloured(found[key]) for key in _ORDER if key in found and found[key].lines]

    def _metrics(self, plan: _Plan) -> Chart:
        steps: list[Step] = self._steps.rows
        names = dict(plan.names)
        if plan.key == "reward":
            parts = sorted({key for step in steps[-200:] for key in step.values if key.startswith(PARTS)})
            names |= {key: key.removeprefix(PARTS) for key in parts}
        lines: dict[str, Line] = {}
        for key, name in names.items():
            some = [(step.step, step.at, step.values[key]) for step in steps if key in step.values]
            if some and name not in lines and not (key == "train/geometry_loss" and not any(one[2] for one in some)):
                lines[name] = line(name, some)
        return Chart(
            key=plan.key, title=plan.title, unit=plan.unit, about=plan.about, lines=list(lines.values())[:_MOST_LINES]
        )

    def _heldout(self) -> Chart:
        scores: list[Score] = self._scores.rows
        # Somebody's own scores of the same run, such as the demo's, take the place of the evaluator's.
        own = [name for score in scores for name in score.values if not name.startswith("eval/")]
        names = list(dict.fromkeys(own or [name for score in scores for name in headline(score.values)]))
        lines = [
            line(
                _ACRONYMS.get(name, name.removeprefix("eval/")),
                [(self.step_of(one.version), one.at, one.values[name]) for one in scores if name in one.values],
            )
            for name in names[:_MOST_LINES]
        ]
        about = "problems that are never trained on, scored beside the run"
        return Chart(key="heldout", title="Held out", unit="score", about=about, lines=lines)

    def step_of(self, version: int) -> float:
        """The step that made a version: the one before the first that started from it."""
        steps: list[Step] = self._steps.rows
        at = bisect_left(steps, version, key=lambda step: step.version)
        if at < len(steps):
            return steps[at].step - 1
        return steps[-1].step if steps else version

    def _rate(self) -> list[Line]:
        steps = [step for step in self._steps.rows if _TOKENS in step.values]
        some: list[tuple[float, float, float]] = []
        first, tokens = 0, 0.0
        for at in range(1, len(steps)):
            tokens += steps[at].values[_TOKENS]
            while first + 1 < at and steps[at].at - steps[first + 1].at >= _WINDOW_S:
                first += 1
                tokens -= steps[first].values[_TOKENS]
            if (over_s := steps[at].at - steps[first].at) > 0:
                some.append((steps[at].step, steps[at].at, tokens / over_s))
        return [line("trained", some)] if some else []

    def _add_history(self, found: dict[str, Chart], index: HistoryIndex) -> None:
        """What only the stored sequences know: endings, and KL and staleness where the trainer computed none."""
        times = {step.step: step.at for step in self._steps.rows}
        trained = [one for one in index.steps() if one.step in times]
        kl = [(one.step, times[one.step], one.kl) for one in trained if one.kl is not None]
        if kl:
            made = line("behaviour to proximal", kl)
            found["kl"] = msgspec.structs.replace(found["kl"], lines=[made, *found["kl"].lines])
        if not found["staleness"].lines and trained:
            mean = [(one.step, times[one.step], one.lag_mean) for one in trained]
            most = [(one.step, times[one.step], float(one.lag_max)) for one in trained]
            lines = [line("mean", mean), line("oldest", most)]
            found["staleness"] = msgspec.structs.replace(found["staleness"], lines=lines)
        found["endings"] = Chart(
            key="endings",
            title="Endings",
            unit="share",
            about="how sequences ended, by the weight version of their last token",
            lines=self._endings(index),
        )

    def _endings(self, index: HistoryIndex) -> list[Line]:
        counted = index.endings()
        names = list(dict.fromkeys(name for one in counted for name in one.counts))[:_MOST_LINES]
        lines: list[Line] = []
        for name in names:
            shares = ((one, one.counts.get(name, 0) / sum(one.counts.values())) for one in counted)
            lines.append(line(name, [(self.step_of(one.version), one.at, share) for one, share in shares]))
        return lines


def line(name: str, points: Sequence[tuple[float, float, float]]) -> Line:
    """From (step, at, value), by time; more than MOST_POINTS are averaged over equal parts, the last one is kept."""
    some = sorted(points, key=lambda point: point[1])
    if len(some) > MOST_POINTS:
        size = len(some) / (MOST_POINTS - 1)
        parts = [some[int(at * size) : max(int((at + 1) * size), int(at * size) + 1)] for at in range(MOST_POINTS - 1)]
        some = [*(_mean(part) for part in parts if part), some[-1]]
    steps, at, values = zip(*some, strict=True) if some else ((), (), ())
    return Line(
        name=name,
        steps=[round(one, 2) for one in steps],
        at=[round(one, 2) for one in at],
        values=list(map(short, values)),
    )


def short(value: float) -> float:
    """Six significant digits: a chart shows fewer."""
    return float(f"{value:.6g}")


def _mean(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    step, at, value = (math.fsum(part) / len(points) for part in zip(*points, strict=True))
    return step, at, value


def _coloured(chart: Chart) -> Chart:
    lines = [msgspec.structs.replace(one, colour=number) for number, one in enumerate(chart.lines)]
    return msgspec.structs.replace(chart, lines=lines)


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def overlaid(runs: Iterable[tuple[str, list[Chart]]]) -> list[Chart]:
    """The first line of every chart, of several runs: a line per run, and a chart per quantity.

    A chart whose first line is something else in some runs, such as the loss, becomes one chart of each.
    """
    found: dict[tuple[str, str], Chart] = {}
    for number, (name, charts) in enumerate(runs):
        for chart in charts:
            what = chart.lines[0].name
            first = msgspec.structs.replace(chart.lines[0], name=name, colour=number)
            held = found.get((chart.key, what))
            key = chart.key if all(key != chart.key or other == what for key, other in found) else f"{chart.key}/{what}"
            found[chart.key, what] = msgspec.structs.replace(
                chart,
                key=held.key if held else key,
                about=f"{what}, {chart.about}",
                lines=[*(held.lines if held else ()), first],
            )
    return [chart for key in _ORDER for (own, _), chart in found.items() if own == key]
