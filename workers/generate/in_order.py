"""The finished output: the part file's answers in the order of the input, whole or absent.

A process that is killed in the middle leaves the part file, and beside it a hidden file that the next run replaces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from pipeline.files import fsync_directory
from pipeline.prompts.rows import is_parquet, parquet_module
from workers.generate.answers import MINIMAL

_CHUNK = 512  # rows of one Parquet write


def write_in_order(path: Path, lines: Iterable[bytes]) -> None:
    """Replace `path` by these lines; Parquet by its name."""
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
    """Columns have one type: ids and stop reasons become strings, metadata JSON."""
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
