"""A finished sequence over time, from what its run stores: the spans that a collector gets, without one.

history: result, job's log, row, trained ──┐
metrics.jsonl: its step ───────────────────┼─▶ trace_of ─▶ `sluice trace`, the sequence's page
weights/v*/manifest.json: its version ─────┘
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceDetail, SequenceFilter, SequenceRow
from sluice.consumers.run_files import HISTORY, METRICS, WEIGHTS
from sluice.pipeline.errors import DataError, MessageError, WeightsError
from sluice.pipeline.telemetry.spans import WORDS, Span, Stage, Waterfall, is_time, step_ref, tree
from sluice.pipeline.terminal import Console
from sluice.pipeline.weights.versions import numbered_directories, read_manifest
from sluice.pipeline.wire.codec import read_json

_SHOWN = 5  # ids, if a part of an id means several
_BAR, _WIDE = 40, 150
_SHORTEST_S = 0.0005  # of a step's part: a trainer without scores measures a few microseconds


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the drawing; `start_s` counts from the first one's start."""

    stage: str
    name: str
    about: str  # in a few words
    depth: int
    start_s: float
    seconds: float
    who: str = ""
    error: str = ""
    attributes: dict[str, Any] = {}


class SequenceTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Printed by `sluice trace --json`."""

    schema_version: int = 1
    seq_id: str
    trace_id: str  # 32 hexadecimal digits, as a collector has it
    state: str
    step: int | None = None
    started_at: float  # Unix s
    seconds: float
    bars: list[Bar]


def find_sequence(reader: HistoryReader, named: str) -> SequenceDetail:
    """By its id, or a part that only one id has. Raises DataError."""
    if (found := reader.sequence(named)) is not None:
        return found
    page = reader.sequences(SequenceFilter(search=named), _SHOWN + 1)
    if len(page.rows) == 1 and (only := reader.sequence(page.rows[0].seq_id)) is not None:
        return only
    if page.rows:
        ids = ", ".join(row.seq_id for row in page.rows[:_SHOWN])
        raise DataError(f"{named!r} is a part of several ids: {ids}{', …' if len(page.rows) > _SHOWN else ''}")
    raise DataError(
        f"no finished sequence {named!r} in the history; it may still be running (`sluice status`), or was pruned "
        "(history.max_sequences), or history.enabled is off"
    )


def read_trace(directory: Path, named: str, model: str = "") -> SequenceTrace:
    """The trace of a sequence of the run in `directory`. Raises DataError."""
    with closing(HistoryReader(directory / HISTORY)) as reader:
        detail = find_sequence(reader, named)
        return trace_of(directory, reader, detail, model)


def trace_of(directory: Path, reader: HistoryReader, detail: SequenceDetail, model: str = "") -> SequenceTrace:
    """The same of a sequence that is read already. Blocking; raises DataError."""
    row, job = detail.row, reader.job(detail.row.job_id)
    spans = Waterfall(
        row.job_id, detail.result.trace if detail.result else {}, [] if job is None else job.events, model=model
    )
    if detail.result is not None:
        spans.decoded(detail.result, row.committed_at)
    reward_s, consumer = row.metrics.get("rollout/reward_s", 0.0), {"reward": row.reward, "error": row.reason}
    spans.consumed(row.seq_id, row.committed_at, row.at, "", reward_s=reward_s, **consumer)
    end = max([row.at, *(span.end for span in spans.spans)])
    if detail.trained is not None and detail.trained.state == "trained":
        end = _add_step(spans, directory, row, detail.trained.step, detail.trained.handed_at, end)
    spans.whole(row.enqueued_at or min((span.start for span in spans.spans), default=row.at), end, error=row.reason)
    drawn = tree(spans.spans)
    start = min(span.start for _, span in drawn)
    return SequenceTrace(
        seq_id=row.seq_id,
        trace_id=f"{spans.ref.trace_id:032x}",
        state=row.trained or row.state,
        step=row.step,
        started_at=start,
        seconds=max(span.end for _, span in drawn) - start,
        bars=[_bar(depth, span, start) for depth, span in drawn],
    )


def _add_step(spans: Waterfall, directory: Path, row: SequenceRow, step: int, handed_at: float, end: float) -> float:
    """The hand-off, its part in the step, and the version that came of it; returns when the last of them ended."""
    if is_time(handed_at):
        spans.handed(row.at, handed_at)
        end = max(end, handed_at)
    values = step_values(directory / METRICS, step)
    at, step_s = values.get("at"), values.get("train/step_s")
    if not isinstance(at, float) or not isinstance(step_s, float):
        return end
    spans.trained(row.seq_id, handed_at or row.at, at, "", step_ref(directory.name, step), step)
    parent, score_s = spans.ref.child("train", row.seq_id), values.get("train/score_s", 0.0)
    parts: tuple[tuple[Stage, float, float], ...] = (
        ("score", at - step_s - score_s, at - step_s),
        ("update", at - step_s, at),
    )
    for stage, start, until in parts:
        if until - start > _SHORTEST_S:
            spans.add(stage, parent.child(stage), start, until, "trainer", parent=parent.span_id)
    published = published_at(directory / WEIGHTS, step, int(values.get("version", 0)))
    if published is None:
        return at
    version, when = published
    about = {"sluice.weights.version": version}
    spans.add("publish", parent.child("publish"), at, when, "trainer", parent=parent.span_id, attributes=about)
    return max(at, when)


def step_values(path: Path, step: int) -> dict[str, Any]:
    """The line of an optimiser step in metrics.jsonl; empty if there is none that can be read."""
    try:
        raw = path.read_bytes()
    except OSError:
        return {}
    begin = raw.rfind(b'{"step":%d,' % step)
    if begin < 0:
        return {}
    try:
        return read_json(raw[begin:].partition(b"\n")[0], dict[str, Any], "it")
    except MessageError:
        return {}


def published_at(root: Path, step: int, version: int) -> tuple[int, float] | None:
    """The first version that has the step in it, and when it was published; None if it isn't there (any more)."""
    number, directory = next((one for one in numbered_directories(root) if one[0] > version), (0, None))
    if directory is None:
        return None
    try:
        manifest = read_manifest(directory)
    except WeightsError:
        return None
    # Of a later one the first with the step is gone, unless it names the step's version as its parent.
    parent = manifest.version - 1 if manifest.parent is None else manifest.parent
    return (number, manifest.published_at) if manifest.step >= step and parent == version else None


def _bar(depth: int, span: Span, start: float) -> Bar:
    who = span.process or ("" if span.stage in ("job", "queue") else span.role)
    return Bar(
        stage=span.stage,
        name=span.stage.replace("_", " "),
        about=WORDS[span.stage],
        depth=depth,
        start_s=span.start - start,
        seconds=span.seconds,
        who=who,
        error=span.error,
        attributes=span.attributes,
    )


def print_trace(found: SequenceTrace) -> None:
    """The waterfall, in a terminal."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    console.print(drawing(found))


def drawing(found: SequenceTrace) -> Group:
    """Renders it; wide enough for a terminal of 100 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, right in (("stage", False), ("from", True), ("took", True), ("", False), ("", False)):
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "" or right, overflow="fold")
    for bar in found.bars:
        says = ", ".join(filter(None, (bar.about, bar.who, bar.error and f"NOT DONE: {bar.error}")))
        table.add_row(
            Text("  " * bar.depth + bar.name, style="bold" if not bar.depth else ""),
            Text(shown_s(bar.start_s)),
            Text(shown_s(bar.seconds)),
            Text(_drawn(bar, found.seconds), style="red" if bar.error else "cyan"),
            Text(says, style="red" if bar.error else "dim"),
        )
    step = "" if found.step is None else f" in step {found.step}"
    head = Text(f"{found.seq_id}: {found.state.replace('_', ' ')}{step}, {shown_s(found.seconds)}")
    return Group(head, Text(f"trace {found.trace_id}\n", style="dim"), table)


def shown_s(seconds: float) -> str:
    """A duration in three figures."""
    return (
        f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    )


def _drawn(bar: Bar, whole_s: float) -> str:
    scale = _BAR / whole_s if whole_s > 0 else 0.0
    before = min(_BAR - 1, int(bar.start_s * scale))
    length = max(1, round(bar.seconds * scale))
    return "·" * before + ("━" * min(length, _BAR - before) if bar.seconds * scale >= 0.5 else "╸")


def longest(bars: Sequence[Bar]) -> Bar | None:
    """The one that took most of the time, of those that hold no other."""
    leaves = [
        one for one, after in zip(bars, [*bars[1:], None], strict=True) if after is None or after.depth <= one.depth
    ]
    return max(leaves, key=lambda one: one.seconds, default=None)
