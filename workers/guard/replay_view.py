"""A replay as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.json_out import json_line
from workers.guard.replay import CUT_BEFORE, HEALTHY, Ending, Example, Replay, Trial

SCHEMA = 1
_ORDER = ("length", "stop", "deadline", "cancelled")


def as_json(found: Replay) -> str:
    """One object; `share` is of the tokens of rows that no guard had cut before."""
    shown = {
        "file": found.path,
        "errors": found.errors,
        "malformed": [f"{row.where}: {row.problem}" for row in found.malformed],
        "trials": [_plain(trial) for trial in found.trials],
    }
    return json_line(shown, SCHEMA).decode().rstrip()


def as_text(found: Replay) -> str:
    """For people: one line a trial where there are several, else all of the one."""
    lines = [_detailed(found.trials[0])] if len(found.trials) == 1 else [_compared(found.trials)]
    if found.errors:
        lines.append(f"{found.errors} rows ended in an error and have no tokens")
    return "\n".join(lines)


def _plain(trial: Trial) -> dict[str, Any]:
    total = trial.total()
    return {
        "name": trial.name,
        "thresholds": trial.rules.config,
        "total": total,
        "share": round(_share(total), 4),
        "cut_by_rule": trial.by_rule,
        "healthy_cut": trial.of(HEALTHY).cut,
        "endings": trial.endings,
        "examples": {"healthy": trial.healthy, "others": trial.others},
    }


def _compared(trials: Sequence[Trial]) -> str:
    head = ["thresholds", "cut", "tokens saved", "share", "healthy rows cut"]
    rows = [head]
    for trial in trials:
        total, healthy = trial.total(), trial.of(HEALTHY)
        cells = [f"{total.cut:,} of {total.rows:,}", f"{total.tokens_saved:,}", f"{_share(total):.1%}"]
        rows.append([trial.name, *cells, f"{healthy.cut:,} of {healthy.rows:,}"])
    return _columns(rows)


def _detailed(trial: Trial) -> str:
    head = ["ended by", "rows", "would be cut", "tokens", "tokens saved", "share"]
    rows = [head, *(_ending(name, trial.of(name)) for name in _ORDER if name in trial.endings)]
    lines = [_columns([*rows, _ending("all", trial.total())])]
    if trial.by_rule:
        lines.append("rules: " + ", ".join(f"{rule} {count:,}" for rule, count in sorted(trial.by_rule.items())))
    before = trial.of(CUT_BEFORE)
    if before.rows:
        lines.append(
            f"{before.rows:,} rows were cut by a guard already: these thresholds cut {before.cut:,} of them, "
            f"{before.tokens_saved:,} tokens earlier; of the others nothing is known beyond their cut"
        )
    if trial.healthy:
        lines.append(f"healthy rows that would be cut ({trial.of(HEALTHY).cut:,} of {trial.of(HEALTHY).rows:,}):")
        lines += [_example(one) for one in trial.healthy]
    if trial.others:
        lines += ["other rows that would be cut, the first:", *(_example(one) for one in trial.others)]
    return "\n".join(lines)


def _ending(name: str, ending: Ending) -> list[str]:
    numbers = (ending.rows, ending.cut, ending.tokens, ending.tokens_saved)
    return [name, *(f"{number:,}" for number in numbers), f"{_share(ending):.1%}"]


def _example(one: Example) -> str:
    name = f"row {one.row}" if one.id is None else f"{one.id} (row {one.row})"
    return f"  {name}, index {one.index}: {one.rule} after {one.at_token:,} of {one.num_tokens:,} tokens"


def _share(ending: Ending) -> float:
    return ending.tokens_saved / ending.tokens if ending.tokens else 0.0


def _columns(rows: list[list[str]]) -> str:
    """The first column to the left, numbers to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(lines)
