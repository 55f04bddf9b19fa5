"""Rows of prompts from JSONL or Parquet.

A row: `messages` (list of {role, content}), optional `truth` (anything the task understands), `id` (string or
number, unique; else the row's own content is its identity), `metadata`. Malformed rows carry file and line.
"""

from __future__ import annotations

import codecs
import importlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config.types import DataConfig
from pipeline.errors import DataError

MAX_ROW_BYTES = 16 << 20
_SAMPLE_BYTES = 1 << 20


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    messages: list[dict[str, Any]]
    truth: Any = None
    id: str | int | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("`messages` is empty; give at least one {role, content}")
        for position, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(f"`messages[{position}]` needs a `role` string and `content`")


class Malformed(msgspec.Struct, frozen=True):
    """A row that cannot be used."""

    where: str  # file:line
    problem: str

    def error(self) -> DataError:
        """The same as an exception."""
        return DataError(f"{self.where}: {self.problem}")


def identity(row: Row) -> str:
    """What makes a row the same row again: its id, else its messages. `1` and `"1"` are two ids."""
    return msgspec.json.encode(row.messages if row.id is None else row.id).decode()


def fingerprint(config: DataConfig) -> str:
    """Identity of the data file: its length and the bytes at its beginning and end."""
    path = _existing(config)
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_SAMPLE_BYTES)
        stream.seek(max(0, size - _SAMPLE_BYTES))
        return sha256(f"{size}:".encode() + head + stream.read()).hexdigest()[:24]


def count_rows(config: DataConfig) -> int:
    """Rows of one epoch, malformed ones included."""
    path = _existing(config)
    if _format(config) == "parquet":
        rows = int(_parquet_file(path).metadata.num_rows)
    else:
        with path.open("rb") as stream:
            rows = sum(1 for line in stream if line.strip())
    return rows if config.limit is None else min(rows, config.limit)


def read_rows(config: DataConfig) -> Iterator[Row | Malformed]:
    """The rows of one epoch in file order."""
    path = _existing(config)
    rows = _read_parquet(path) if _format(config) == "parquet" else _read_jsonl(path)
    for position, row in enumerate(rows):
        if config.limit is not None and position >= config.limit:
            return
        yield row


def _read_jsonl(path: Path) -> Iterator[Row | Malformed]:
    decoder = msgspec.json.Decoder(Row)
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            where = f"{path}:{number}"
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if not line.strip():
                continue
            if len(line) > MAX_ROW_BYTES:
                yield Malformed(where, f"{len(line)} bytes; a row may have at most {MAX_ROW_BYTES}")
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                yield Malformed(where, f"malformed row: {error}")


def _read_parquet(path: Path) -> Iterator[Row | Malformed]:
    number = 0
    for batch in _parquet_file(path).iter_batches(batch_size=256):
        for tree in batch.to_pylist():
            number += 1
            try:
                kept = {key: value for key, value in tree.items() if value is not None}
                yield msgspec.convert(kept, Row)
            except msgspec.ValidationError as error:
                yield Malformed(f"{path}: row {number}", f"malformed row: {error}")


def _existing(config: DataConfig) -> Path:
    if not config.path:
        raise DataError("data.path is not set; give --data FILE.jsonl or FILE.parquet")
    path = Path(config.path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; data.path must name a JSONL or Parquet file")
    return path


def _format(config: DataConfig) -> str:
    if config.format != "auto":
        return config.format
    return "parquet" if config.path.endswith((".parquet", ".pq")) else "jsonl"


def _parquet_file(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet").ParquetFile(path)
    except ModuleNotFoundError as error:
        raise DataError("Parquet needs pyarrow: `pip install sluice[data]`, or give JSONL") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a whole Parquet file ({error})") from error
