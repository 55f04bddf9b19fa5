"""`sluice guard replay`: what thresholds would have cut from already decoded sequences; needs no model.

- Each row's tokens go through the same guard the engines use. A row is cut if it triggers before its last token;
  triggers after that don't count.
- `tokens_saved` are the tokens from there on; one of them is still decoded: the forced end.
- For a row that a guard had already cut, nothing is known beyond its cut: it is counted separately, and so are its
  saved tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec

from sluice.pipeline.config import load_config
from sluice.pipeline.config.load import parse_yaml
from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError, DataError
from sluice.pipeline.prompts.rows import Malformed, is_parquet, read_rows
from sluice.pipeline.terminal import json_line
from sluice.pipeline.wire.messages import FinishReason
from sluice.workers.guard.repeat import Rule
from sluice.workers.guard.rules import GuardRules, subtree

CUT_BEFORE: FinishReason = "repeat_terminated"
HEALTHY: FinishReason = "stop"
_EXAMPLES = 5  # of each kind
_SCOPES = (
    "custom.extra.rollout_matching.repeat_terminate.",
    "rollout_matching.repeat_terminate.",
    "repeat_terminate.",
)
_MAX_TRIALS = 64
SCHEMA = 1
_ORDER = sorted(get_args(FinishReason), key=lambda reason: reason != "length")  # loops end there


class Signal(msgspec.Struct, frozen=True):
    """The relevant part of a row's `triggers`."""

    at_token: int | None = None


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """The relevant fields of a row of `sluice generate`; others are skipped."""

    finish_reason: FinishReason
    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    id: str | int | None = None
    row: int = 0
    index: int = 0
    triggers: Signal = Signal()

    def __post_init__(self) -> None:
        if self.token_ids is None and self.finish_reason != "error":
            raise ValueError("no token_ids; replay needs rows written with `--fields all`")
        at = self.triggers.at_token
        if self.finish_reason == CUT_BEFORE and (at is None or not 0 <= at <= len(self.token_ids or ())):
            raise ValueError(f"a guard ended it, but triggers.at_token is {at}, not an index of its token_ids")

    @property
    def tokens(self) -> list[int]:
        """The tokens the model chose; without a forced end."""
        tokens = self.token_ids or []
        return tokens[: self.triggers.at_token] if self.finish_reason == CUT_BEFORE else tokens


class Ending(msgspec.Struct, kw_only=True):
    """The rows of one `finish_reason`."""

    rows: int = 0
    cut: int = 0
    tokens: int = 0  # chosen by the model
    tokens_saved: int = 0


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A row that would have been cut."""

    id: str | int | None
    row: int
    index: int
    finish_reason: FinishReason
    rule: Rule
    at_token: int
    num_tokens: int


@dataclass
class Trial:
    """One set of thresholds over all rows."""

    name: str
    rules: GuardRules
    endings: dict[FinishReason, Ending] = field(default_factory=dict)
    by_rule: Counter[Rule] = field(default_factory=Counter)  # without rows that a guard had already cut
    healthy: list[Example] = field(default_factory=list)  # the first that ended by themselves and would have been cut
    others: list[Example] = field(default_factory=list)

    def add(self, row: ReplayRow) -> None:
        """Count one row."""
        tokens, before = row.tokens, row.finish_reason == CUT_BEFORE
        ending = self.endings.setdefault(row.finish_reason, Ending())
        ending.rows += 1
        ending.tokens += len(tokens)
        guard = self.rules.guard()
        last = len(tokens) if before else len(tokens) - 1  # the forced end followed, so one more position is known
        trigger = next(filter(None, map(guard.push, tokens[:last])), None)
        if trigger is None:
            return
        ending.cut += 1
        ending.tokens_saved += len(tokens) - trigger.at_token
        if before:
            return
        self.by_rule[trigger.rule] += 1
        examples = self.healthy if row.finish_reason == HEALTHY else self.others
        if len(examples) < _EXAMPLES:
            examples.append(_example(row, trigger.rule, trigger.at_token, len(tokens)))

    def total(self) -> Ending:
        """All rows except those a guard had already cut."""
        known = [ending for reason, ending in self.endings.items() if reason != CUT_BEFORE]
        return Ending(**{name: sum(getattr(one, name) for one in known) for name in Ending.__struct_fields__})

    def of(self, reason: FinishReason) -> Ending:
        """Rows of one ending; possibly none."""
        return self.endings.get(reason, Ending())


@dataclass
class Replay:
    """The outcome over one file."""

    path: str
    trials: Sequence[Trial]
    errors: int = 0  # rows without tokens
    malformed: list[Malformed] = field(default_factory=list)


def replay(path: Path, trials: Sequence[Trial], *, skip_malformed: bool = False) -> Replay:
    """Every row of a JSONL or Parquet file through every trial. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; give the output of `sluice generate`")
    found = Replay(str(path), trials)
    for row in _rows(path):
        if isinstance(row, Malformed):
            found.malformed.append(row)
        elif row.finish_reason == "error":
            found.errors += 1
        else:
            for trial in trials:
                trial.add(row)
    if found.malformed and not skip_malformed:
        first, more = found.malformed[0], len(found.malformed) - 1
        others = f"; {more} more are malformed" if more else ""
        raise DataError(f"{first.error()}{others}; fix it, or skip such rows: --on-malformed skip")
    return found


def _rows(path: Path) -> Iterable[ReplayRow | Malformed]:
    return read_rows(path, ReplayRow, parquet=is_parquet(path))


def _example(row: ReplayRow, rule: Rule, at_token: int, num_tokens: int) -> Example:
    ids: dict[str, Any] = {"id": row.id, "row": row.row, "index": row.index, "finish_reason": row.finish_reason}
    return Example(**ids, rule=rule, at_token=at_token, num_tokens=num_tokens)


def make_trials(
    config: Path | None, overrides: Sequence[str] = (), vary: Sequence[str] = (), model: str | None = None
) -> list[Trial]:
    """One trial per combination of the values to vary. Keys are bare or full paths.

    `model`: the directory whose tokenizer defines `object_key_prefix`; None: the configuration's. Raises ConfigError,
    and ModelError if a required tokenizer is missing.
    """
    loaded = load_config(config)
    tree: dict[str, Any] = msgspec.to_builtins(loaded.rollout_matching.repeat_terminate)
    for item in overrides:
        tree |= _pair(item, "--set")
    tree["enabled"] = True  # whether the run itself has a guard doesn't matter here
    choices = [[_pair(f"{item.partition('=')[0]}={one}", "--vary") for one in _values(item)] for item in vary]
    combinations = list(product(*choices))
    if len(combinations) > _MAX_TRIALS:
        raise ConfigError(f"--vary: {len(combinations)} combinations; at most {_MAX_TRIALS} are compared at a time")
    directory, tokenizer = model or loaded.model.path, None
    trials: list[Trial] = []
    for changes in combinations:
        changed = {key: value for change in changes for key, value in change.items()}
        name = ", ".join(f"{key}={msgspec.json.encode(value).decode()}" for key, value in changed.items())
        thresholds = subtree({**tree, **changed}, str(config or "defaults"))
        if thresholds.max_object_keys is not None and tokenizer is None:
            tokenizer = _tokenizer(directory)
        trials.append(Trial(name, GuardRules.of(thresholds, tokenizer)))
    return trials


def _pair(item: str, option: str) -> dict[str, Any]:
    """`key=value` as a one-entry mapping with the bare key. Raises ConfigError for a missing or unknown key."""
    key, sep, text = item.partition("=")
    if not sep:
        raise ConfigError(f"{option} {item!r}: write it as {option} key=value, e.g. {option} ngram_size=32")
    bare = key.strip()
    for place in _SCOPES:
        bare = bare.removeprefix(place)
    pair = {bare: parse_yaml(text, f"{option} {item}")}
    subtree({**msgspec.to_builtins(RepeatTerminateConfig()), **pair, "enabled": False}, f"{option} {item}")
    return pair


def _values(item: str) -> list[str]:
    _, sep, text = item.partition("=")
    values = [value.strip() for value in text.split(",")]
    if not sep or not all(values):
        raise ConfigError(f"--vary {item!r}: write it as --vary key=value,value, e.g. --vary ngram_size=16,32")
    return values


def _tokenizer(directory: str) -> Any:
    if not directory:
        raise ConfigError(
            "max_object_keys counts object_key_prefix in the bytes that the model's tokens write: name the model's "
            "directory, --model DIR"
        )
    from sluice.workers.model_files import load_tokenizer  # slow to load

    return load_tokenizer(directory)


def as_json(found: Replay) -> str:
    """One object; `share` is relative to the tokens of rows that no guard had cut before."""
    shown = {
        "file": found.path,
        "errors": found.errors,
        "malformed": [f"{row.where}: {row.problem}" for row in found.malformed],
        "trials": [_plain(trial) for trial in found.trials],
    }
    return json_line(shown, SCHEMA).decode().rstrip()


def as_text(found: Replay) -> str:
    """For people: one line per trial if there are several, else the full report of the one."""
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
    rows = [head, *(_ending(name, trial.of(name)) for name in _ORDER if name in trial.endings and name != CUT_BEFORE)]
    lines = [_columns([*rows, _ending("all", trial.total())])]
    if trial.by_rule:
        lines.append("rules: " + ", ".join(f"{rule} {count:,}" for rule, count in sorted(trial.by_rule.items())))
    before = trial.of(CUT_BEFORE)
    if before.rows:
        lines.append(
            f"{before.rows:,} rows were cut by a guard already: these thresholds cut {before.cut:,} of them, "
            f"{before.tokens_saved:,} tokens earlier; what the others would have become is unknown"
        )
    if trial.healthy:
        lines.append(f"healthy rows that would be cut ({trial.of(HEALTHY).cut:,} of {trial.of(HEALTHY).rows:,}):")
        lines += [_example_line(one) for one in trial.healthy]
    if trial.others:
        lines += ["other rows that would be cut, the first:", *(_example_line(one) for one in trial.others)]
    return "\n".join(lines)


def _ending(name: str, ending: Ending) -> list[str]:
    numbers = (ending.rows, ending.cut, ending.tokens, ending.tokens_saved)
    return [name, *(f"{number:,}" for number in numbers), f"{_share(ending):.1%}"]


def _example_line(one: Example) -> str:
    name = f"row {one.row}" if one.id is None else f"{one.id} (row {one.row})"
    return f"  {name}, index {one.index}: {one.rule} after {one.at_token:,} of {one.num_tokens:,} tokens"


def _share(ending: Ending) -> float:
    return ending.tokens_saved / ending.tokens if ending.tokens else 0.0


def _columns(rows: list[list[str]]) -> str:
    """The first column left-aligned, numbers right-aligned."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(lines)
