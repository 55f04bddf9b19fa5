"""Rows of prompts from JSONL, Parquet or Hugging Face `datasets` (hf_dataset.py).

A row: `messages` (list of {role, content}), optional `truth` (anything the task understands), `id` (string or
number, unique; else the row's own content is its identity), `images` (a list of paths, URLs, `sha256:…` digests or
{path, url, sha256}; the workers fetch them), `metadata`. Malformed rows carry file and line.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config.types import DataConfig
from pipeline.errors import DataError
from pipeline.prompts import rows
from pipeline.prompts.admission import Limits
from pipeline.prompts.rows import MAX_ROW_BYTES, Malformed
from pipeline.wire.messages import ImageRef
from producers import hf_dataset

_SAMPLE_BYTES = 1 << 20


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    messages: list[dict[str, Any]]
    truth: Any = None
    id: str | int | None = None
    images: list[str | ImageRef] = []
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        rows.check_messages(self.messages)

    def image_refs(self) -> list[ImageRef]:
        """The images as a job names them."""
        return [ImageRef.of(image) if isinstance(image, str) else image for image in self.images]


def identity(row: Row) -> str:
    """What makes a row the same row again: its id, else its messages and images. `1` and `"1"` are two ids."""
    content: Any = [row.messages, row.images] if row.images else row.messages
    return msgspec.json.encode(content if row.id is None else row.id).decode()


def fingerprint(config: DataConfig) -> str:
    """Identity of the data file: its length and the bytes at its beginning and end."""
    if _is_dataset(config):
        return hf_dataset.fingerprint(config.path)
    path = _existing(config)
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_SAMPLE_BYTES)
        stream.seek(max(0, size - _SAMPLE_BYTES))
        return sha256(f"{size}:".encode() + head + stream.read()).hexdigest()[:24]


def count_rows(config: DataConfig) -> int:
    """Rows of one epoch, malformed ones included."""
    total = hf_dataset.count_rows(config.path) if _is_dataset(config) else _count_in_file(config)
    return total if config.limit is None else min(total, config.limit)


def read_rows(config: DataConfig, limits: Limits | None = None) -> Iterator[Row | Malformed]:
    """The rows of one epoch in file order; `limits` are those of the model."""
    found = hf_dataset.read_rows(config.path, Row, limits) if _is_dataset(config) else _read_file(config, limits)
    for position, row in enumerate(found):
        if config.limit is not None and position >= config.limit:
            return
        yield row


def _count_in_file(config: DataConfig) -> int:
    return rows.count_rows(_existing(config), parquet=_is_parquet(config))


def _read_file(config: DataConfig, limits: Limits | None) -> Iterator[Row | Malformed]:
    return rows.read_rows(
        _existing(config), Row, parquet=_is_parquet(config), max_row_bytes=MAX_ROW_BYTES, limits=limits
    )


def _is_dataset(config: DataConfig) -> bool:
    if config.format == "auto":
        return hf_dataset.is_dataset(config.path)
    return config.format == "datasets" and bool(config.path)


def _existing(config: DataConfig) -> Path:
    if not config.path:
        raise DataError("data.path is not set; give --data FILE.jsonl, FILE.parquet, a saved data set or hf:NAME")
    path = Path(config.path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; data.path must name a JSONL or Parquet file")
    return path


def _is_parquet(config: DataConfig) -> bool:
    return rows.is_parquet(config.path) if config.format == "auto" else config.format == "parquet"
