"""Rows of JSONL or Parquet files as typed structs.

- Rows come in file order, one at a time. A row that cannot be used is a `Malformed` with file and line; its
  neighbours are read.
- Blank lines are no rows but count as lines; a byte order mark is no part of the first row.
"""

from __future__ import annotations

import codecs
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline.admission import Limits, admit_json, admit_prompt
from pipeline.errors import DataError, RequestError
from pipeline.surrogates import lone_surrogate_in_json

MAX_ROW_BYTES = 16 << 20
_PARQUET_ENDINGS = (".parquet", ".pq")
_RowT = TypeVar("_RowT")


class Malformed(msgspec.Struct, frozen=True):
    """A row that cannot be used."""

    where: str  # file:line
    problem: str

    def error(self) -> DataError:
        """The same as an exception."""
        return DataError(f"{self.where}: {self.problem}")


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless there is a message, and each has a role and content."""
    if not messages:
        raise ValueError("`messages` is empty; give at least one {role, content}")
    for position, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"`messages[{position}]` needs a `role` string and `content`")


def admit_row(row: object, limits: Limits) -> None:
    """Raise ValueError for a row whose prompt costs too much."""
    try:
        admit_prompt(getattr(row, "messages", None) or getattr(row, "prompt", None), None, limits, "`messages`")
    except RequestError as error:
        raise ValueError(str(error)) from error


def is_parquet(path: str | Path) -> bool:
    """By its name."""
    return str(path).endswith(_PARQUET_ENDINGS)


def read_rows(
    path: Path,
    kind: type[_RowT],
    *,
    parquet: bool,
    name: str = "",
    max_row_bytes: int = MAX_ROW_BYTES,
    limits: Limits | None = None,
) -> Iterator[_RowT | Malformed]:
    """The rows of a file; `name` stands for the path in what is said. Raises DataError for a damaged Parquet file."""
    limits = limits or Limits()
    if parquet:
        return _read_parquet(path, kind, name or str(path), limits)
    return _read_jsonl(path, kind, name or str(path), max_row_bytes, limits)


def count_rows(path: Path, *, parquet: bool) -> int:
    """Rows of a file, malformed ones included."""
    if parquet:
        return int(_parquet_file(path).metadata.num_rows)
    with path.open("rb") as stream:
        return sum(1 for line in stream if line.strip())


def parquet_module() -> Any:
    """`pyarrow.parquet`; raises DataError where it is not installed."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise DataError("Parquet needs pyarrow: `pip install sluice[data]`, or give JSONL") from error


def _read_jsonl(
    path: Path, kind: type[_RowT], name: str, max_row_bytes: int, limits: Limits
) -> Iterator[_RowT | Malformed]:
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            where = f"{name}:{number}"
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if not line.strip():
                continue
            if len(line) > max_row_bytes:
                yield Malformed(where, f"{len(line)} bytes; a row may have at most {max_row_bytes}")
                continue
            try:
                admit_json(line, "the row")
                row = decoder.decode(line)
                admit_row(row, limits)
                yield row
            except (msgspec.MsgspecError, ValueError, RequestError, RecursionError) as error:
                yield Malformed(where, f"malformed row: {lone_surrogate_in_json(line, '') or error}")


def _read_parquet(path: Path, kind: type[_RowT], name: str, limits: Limits) -> Iterator[_RowT | Malformed]:
    number = 0
    for batch in _parquet_file(path).iter_batches(batch_size=256):
        for tree in batch.to_pylist():
            number += 1
            try:
                kept = {key: value for key, value in tree.items() if value is not None}
                row = msgspec.convert(kept, kind)
                admit_row(row, limits)
                yield row
            except (msgspec.ValidationError, ValueError) as error:
                yield Malformed(f"{name}: row {number}", f"malformed row: {error}")


def _parquet_file(path: Path) -> Any:
    module = parquet_module()
    try:
        return module.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a whole Parquet file ({error})") from error
