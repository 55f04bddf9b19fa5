"""The rows of the output, and the finished file: in the order of the input, whole or absent.

- Each (row, index) has a fixed sequence number, independent of file length and `n`. It determines the seed, so a
  prompt's first answer with n = 4 equals its answer with n = 1.
- A process killed while writing the finished file leaves the part file, plus a hidden file beside it that the next run
  replaces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from sluice.pipeline.errors import SluiceError
from sluice.pipeline.files import fsync_directory
from sluice.pipeline.prompts.rows import Malformed, is_parquet, parquet_module
from sluice.pipeline.wire.messages import FinishReason
from sluice.workers.engine.contracts import EngineFacts
from sluice.workers.engine.requests import GenerationResult

MINIMAL = ("id", "row", "index", "text", "finish_reason", "error", "num_new_tokens")
_ROW_BITS = 24
MAX_ROWS = 1 << _ROW_BITS
MAX_N = 256  # sequences of one prompt; index and row together fill the 32 bits between two seeds
_CHUNK = 512  # rows of one Parquet write


class EngineNote(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine answered."""

    backend: str
    version: str
    model: str
    dtype: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. `finish_reason` error: nothing was decoded, and `error` says why."""

    id: str | int | None = None  # the prompt's own
    row: int  # of the prompt in its file, from 0; blank lines don't count
    index: int = 0  # of the sequence among the prompt's n
    text: str = ""
    raw_text: str = ""  # complete, with special tokens
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    triggers: dict[str, Any] = {}  # from the repeat guard, as in `GenerationResult`
    error: str | None = None
    token_ids: list[int] = []
    response_mask: list[int] = []  # empty = all ones
    logprobs: list[float] = []  # raw, nats
    prompt_token_ids: list[int] = []
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    prompt_truncated: int = 0  # tokens cut from the prompt's left
    metadata: dict[str, Any] = {}  # the prompt's own
    engine: EngineNote | None = None  # None: no engine was called
    fallback: dict[str, str] | None = None  # wanted, used, reason: another backend answered

    @property
    def number(self) -> int:
        """The sequence's number; see `number_of`."""
        return number_of(self.row, self.index)

    @classmethod
    def of(cls, row: int, index: int, result: GenerationResult, *, id: str | int | None, metadata: Any) -> Answer:
        """The answer from an engine."""
        names = ("text", "raw_text", "finish_reason", "stop_reason", "triggers", "error", "token_ids", "logprobs")
        more = ("response_mask", "prompt_token_ids", "num_prompt_tokens", "num_new_tokens", "prompt_truncated")
        taken = {name: getattr(result, name) for name in (*names, *more)}
        fallback = result.fallback or None
        return cls(
            id=id, row=row, index=index, metadata=metadata, engine=_note(result.engine), fallback=fallback, **taken
        )

    @classmethod
    def refused(cls, row: int, index: int, malformed: Malformed) -> Answer:
        """The answer for a row that couldn't be read."""
        return cls(row=row, index=index, finish_reason="error", error=str(malformed.error()))

    @classmethod
    def failed(cls, row: int, index: int, error: SluiceError, *, id: str | int | None, metadata: Any) -> Answer:
        """The answer for a row that no engine here can take."""
        return cls(id=id, row=row, index=index, metadata=metadata, finish_reason="error", error=f"row {row}: {error}")

    def line(self, fields: Literal["minimal", "all"]) -> bytes:
        """JSON with its newline."""
        chosen = self if fields == "all" else {name: getattr(self, name) for name in MINIMAL}
        return msgspec.json.encode(chosen) + b"\n"


def _note(facts: EngineFacts) -> EngineNote:
    return EngineNote(backend=facts.name, version=facts.engine_version, model=facts.model, dtype=facts.dtype)


def number_of(row: int, index: int) -> int:
    """`row` counts from 0 in the file, `index` from 0 in the row."""
    return (index << _ROW_BITS) | row


def row_and_index(number: int) -> tuple[int, int]:
    """The inverse of `number_of`."""
    return number & (MAX_ROWS - 1), number >> _ROW_BITS


def write_in_order(path: Path, lines: Iterable[bytes]) -> None:
    """Replace `path` with these lines; a Parquet name writes Parquet."""
    with _aside(path) as aside:
        if is_parquet(path):
            _write_parquet(aside, iter(lines))
        else:
            with aside.open("wb") as stream:
                stream.writelines(lines)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    aside = path.with_name(f".{path.name}.tmp")
    try:
        yield aside
        with aside.open("rb") as stream:
            os.fsync(stream.fileno())
        aside.replace(path)
        fsync_directory(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def _write_parquet(path: Path, lines: Iterator[bytes]) -> None:
    chunk = [msgspec.json.decode(line) for line in islice(lines, _CHUNK)]
    schema = _schema(minimal="token_ids" not in chunk[0] if chunk else False)
    with parquet_module().ParquetWriter(path, schema) as writer:
        while chunk:
            writer.write_table(_table([_flat(row) for row in chunk], schema))
            chunk = [msgspec.json.decode(line) for line in islice(lines, _CHUNK)]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Columns have one type: ids and stop reasons become strings, metadata becomes JSON."""
    for name in ("id", "stop_reason"):
        if row.get(name) is not None:
            row[name] = str(row[name])
    if "metadata" in row:
        row["metadata"] = json.dumps(row["metadata"], ensure_ascii=False)
    return row


def _schema(*, minimal: bool) -> Any:
    import pyarrow as pa

    text, count, tokens = pa.string(), pa.int32(), pa.list_(pa.int32())
    types = {
        "id": text,
        "row": count,
        "index": count,
        "text": text,
        "raw_text": text,
        "finish_reason": text,
        "stop_reason": text,
        "triggers": pa.struct([("repeat_terminate", count), ("active", count), ("rule", text), ("at_token", count)]),
        "error": text,
        "token_ids": tokens,
        "response_mask": tokens,
        "logprobs": pa.list_(pa.float32()),
        "prompt_token_ids": tokens,
        "num_prompt_tokens": count,
        "num_new_tokens": count,
        "prompt_truncated": count,
        "metadata": text,
        "engine": pa.struct([(name, text) for name in ("backend", "version", "model", "dtype")]),
        "fallback": pa.struct([(name, text) for name in ("wanted", "used", "reason")]),
    }
    return pa.schema([(name, kind) for name, kind in types.items() if not minimal or name in MINIMAL])


def _table(rows: list[dict[str, Any]], schema: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=schema)
