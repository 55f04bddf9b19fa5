"""One export, from a run's directory to a path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from consumers.codec import HFTextCodec
from consumers.export.row import Row, full_row, is_plain, sft_row
from consumers.export.source import Exported, Kind, read_run
from consumers.export.writers import aside, write_dataset, write_jsonl, write_parquet
from pipeline.errors import DataError, ModelError
from pipeline.logs import get_logger

Format = Literal["jsonl", "parquet", "datasets", "trl"]


@dataclass
class Exports:
    """What an export did."""

    sequences: int = 0
    without_weight: int = 0  # left out by trl: no token of theirs has one
    weighted: int = 0  # by other weights than 0 and 1, which trl's labels cannot say


def export_run(directory: Path, to: Format, out: Path, kind: Kind, model: str) -> Exports:
    """Write the run's sequences; `model` is where its tokenizer is. Raises DataError."""
    done = Exports()
    with aside(out) as path:
        found = read_run(directory, kind)
        if to == "trl":
            write_dataset(_sft_rows(found, done), path, sft=True)
        else:
            write = {"jsonl": write_jsonl, "parquet": write_parquet, "datasets": write_dataset}[to]
            write(_full_rows(found, done, model), path)
    return done


def _full_rows(found: Iterator[Exported], done: Exports, model: str) -> Iterator[Row]:
    codec = _codec(model)
    for one in found:
        done.sequences += 1
        yield full_row(one, codec)


def _sft_rows(found: Iterator[Exported], done: Exports) -> Iterator[Row]:
    for one in found:
        row = sft_row(one)
        if row is None:
            done.without_weight += 1
            continue
        done.sequences += 1
        done.weighted += not is_plain(one)
        yield row
    if not done.sequences:
        raise DataError(f"nothing to export: no token of {done.without_weight} sequences has a cross-entropy weight")


def _codec(model: str) -> HFTextCodec | None:
    try:
        return HFTextCodec(model)
    except ModelError as error:
        get_logger().warning("`prompt` and `target` stay empty: the run's tokenizer cannot be read", cause=str(error))
        return None
