"""What other thresholds would have cut of sequences that were decoded already; no model, torch-free.

- Each row's own tokens go through the very guard of the engines. A row is cut where it triggers before its last token;
  what comes after that does not count.
- `tokens_saved` are the tokens from there on, one of which is decoded all the same: the end that is forced.
- Of a row that a guard had cut nothing is known beyond its cut: it counts apart, and so does what is saved of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pipeline.errors import DataError
from pipeline.prompts.rows import Malformed, is_parquet, read_rows
from pipeline.wire.messages import FinishReason
from workers.guard.repeat import Rule
from workers.guard.rules import GuardRules

CUT_BEFORE: FinishReason = "repeat_terminated"
HEALTHY: FinishReason = "stop"
_EXAMPLES = 5  # of each kind


class Signal(msgspec.Struct, frozen=True):
    """`triggers` of a row, as far as it matters."""

    at_token: int | None = None


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed of a row of `sluice generate`; its other fields are skipped."""

    finish_reason: FinishReason
    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    id: str | int | None = None
    row: int = 0
    index: int = 0
    triggers: Signal = Signal()

    def __post_init__(self) -> None:
        if self.token_ids is None and self.finish_reason != "error":
            raise ValueError("no token_ids; replay needs the rows of `--fields all`")
        at = self.triggers.at_token
        if self.finish_reason == CUT_BEFORE and (at is None or not 0 <= at <= len(self.token_ids or ())):
            raise ValueError(f"a guard ended it, and triggers.at_token is {at}, not a place in its token_ids")

    @property
    def tokens(self) -> list[int]:
        """What the model chose; an end that was forced is left out."""
        tokens = self.token_ids or []
        return tokens[: self.triggers.at_token] if self.finish_reason == CUT_BEFORE else tokens


class Ending(msgspec.Struct, kw_only=True):
    """The rows of one `finish_reason`."""

    rows: int = 0
    cut: int = 0
    tokens: int = 0  # that the model chose
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
    by_rule: Counter[Rule] = field(default_factory=Counter)  # without rows that a guard had cut before
    healthy: list[Example] = field(default_factory=list)  # the first that ended by themselves and would have been cut
    others: list[Example] = field(default_factory=list)

    def add(self, row: ReplayRow) -> None:
        """One more row."""
        tokens, before = row.tokens, row.finish_reason == CUT_BEFORE
        ending = self.endings.setdefault(row.finish_reason, Ending())
        ending.rows += 1
        ending.tokens += len(tokens)
        guard = self.rules.guard()
        last = len(tokens) if before else len(tokens) - 1  # the forced end followed, so that one place more is known
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
        """All rows but those that a guard had cut before."""
        known = [ending for reason, ending in self.endings.items() if reason != CUT_BEFORE]
        return Ending(**{name: sum(getattr(one, name) for one in known) for name in Ending.__struct_fields__})

    def of(self, reason: FinishReason) -> Ending:
        """Those of one ending, none perhaps."""
        return self.endings.get(reason, Ending())


@dataclass
class Replay:
    """The outcome over a file."""

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
        raise DataError(f"{first.error()}{others}; mend it, or leave such rows out: --on-malformed skip")
    return found


def _rows(path: Path) -> Iterable[ReplayRow | Malformed]:
    return read_rows(path, ReplayRow, parquet=is_parquet(path))


def _example(row: ReplayRow, rule: Rule, at_token: int, num_tokens: int) -> Example:
    ids: dict[str, Any] = {"id": row.id, "row": row.row, "index": row.index, "finish_reason": row.finish_reason}
    return Example(**ids, rule=rule, at_token=at_token, num_tokens=num_tokens)
