"""Rows → a file or a directory: streamed in bounded memory, written aside, renamed when whole."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from consumers.export.row import Row, columns, flat
from pipeline.errors import DataError
from pipeline.prompts.rows import parquet_module

_MOST_ROWS = 256
_MOST_TOKENS = 1 << 18  # of a Parquet row group: some 10 arrays each


@contextlib.contextmanager
def aside(out: Path) -> Generator[Path]:
    """A path beside `out` that becomes `out` at the end; raises DataError where that exists."""
    if out.exists():
        raise DataError(f"{out} exists; name another, or delete it")
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        yield path
        path.rename(out)
    finally:
        _remove(path)


def write_jsonl(rows: Iterable[Row], path: Path) -> None:
    """One JSON object a line; NaN is null."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as stream:
        for row in rows:
            stream.write(encoder.encode(row) + b"\n")


def write_parquet(rows: Iterable[Row], path: Path, *, sft: bool = False) -> None:
    """Row groups of at most `_MOST_ROWS` rows."""
    module = parquet_module()
    arrow = importlib.import_module("pyarrow")
    schema = columns(arrow, sft=sft)
    with module.ParquetWriter(path, schema) as writer:
        for group in _groups(rows):
            writer.write_table(arrow.Table.from_pylist([flat(row) for row in group], schema=schema))


def write_dataset(rows: Iterable[Row], path: Path, *, sft: bool = False) -> None:
    """A directory for `datasets.load_from_disk`."""
    module = datasets_module()
    work = path.with_name(f"{path.name}-parts")
    work.mkdir()
    try:
        write_parquet(rows, work / "rows.parquet", sft=sft)
        bars = module.are_progress_bars_disabled()
        module.disable_progress_bars()
        try:
            found = module.Dataset.from_parquet(str(work / "rows.parquet"), cache_dir=str(work / "cache"))
            found.save_to_disk(str(path))
        finally:
            if not bars:
                module.enable_progress_bars()
    finally:
        _remove(work)


def datasets_module() -> Any:
    """`datasets`; raises DataError where it is not installed."""
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise DataError("this needs Hugging Face datasets: pip install 'sluice[data]'") from error


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    tokens = 0
    for row in rows:
        group.append(row)
        tokens += len(row["labels"])
        if len(group) == _MOST_ROWS or tokens >= _MOST_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
