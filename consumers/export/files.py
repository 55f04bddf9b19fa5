"""The files of an export: typed columns, formats, and a temporary path that is renamed when they are complete.

- Temporary directories have names of their own: what a killed export leaves behind stops no other.
- Parquet and datasets have typed columns (`columns`); fields without a fixed shape (`JSON_COLUMNS`) are JSON text.
- Row groups are bounded, so that a reader never holds a whole run.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from sluice.consumers.export.images import features
from sluice.consumers.export.texts import TextShape, text_columns
from sluice.pipeline.errors import DataError, how_to_install
from sluice.pipeline.prompts.rows import parquet_module

Format = Literal["jsonl", "parquet", "datasets", "trl"]
Images = Literal["copies", "references"]
Row = dict[str, Any]
JSON_COLUMNS = ("stop_reason", "truth", "metrics", "metadata", "triggers", "sampling")
# Of a Parquet row group:
_MOST_ROWS = 256
_MOST_TOKENS = 1 << 18  # about 10 arrays each
_MOST_BYTES = 32 << 20  # of images; a reader holds a whole group
_SHARD = "data/train-00000-of-00001.parquet"


def flat(row: Row) -> Row:
    """The row with non-fixed shapes as JSON text."""
    texts = {name: msgspec.json.encode(row[name]).decode() for name in JSON_COLUMNS if row.get(name) is not None}
    return {**row, **texts}


def columns(arrow: Any, *, sft: bool, images: Images | None = None) -> Any:
    """The schema of the rows; `arrow` is the module pyarrow. Without `images` there's no such column."""
    ints, floats, text = arrow.list_(arrow.int32()), arrow.list_(arrow.float32()), arrow.string()
    wide = arrow.list_(arrow.int64())
    kinds = {
        text: "seq_id group_id task prompt target rollout_id worker backend text finish_reason logprobs_mode",
        arrow.int64(): "step version index turn attempt prompt_len",
        arrow.float64(): "reward advantage enqueued_at temperature",
        ints: "token_ids labels segments response_mask versions proximal_versions",
        floats: "weights logprobs proximal_logprobs",
    }
    if sft:
        kinds = {wide: "input_ids labels attention_mask"} if images is None else {text: "prompt completion"}
    found = [(name, kind) for kind, names in kinds.items() for name in names.split()]
    found += [] if sft else [(name, text) for name in JSON_COLUMNS]
    if images is None:
        return arrow.schema(found)
    names = {"path": text, "url": text, "sha256": text}
    one = names if images == "references" else {"bytes": arrow.binary(), "path": text}
    schema = arrow.schema([*found, ("images", arrow.list_(arrow.struct(list(one.items()))))])
    return schema if images == "references" else schema.with_metadata(features(schema))


@contextlib.contextmanager
def aside(out: Path) -> Generator[Path]:
    """Yield a temporary path that is renamed to `out` at the end; raises DataError if `out` exists."""
    if out.exists():
        raise DataError(f"{out} exists; name another, or delete it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with temporary(out) as directory:
        path = directory / out.name
        yield path
        path.rename(out)


@contextlib.contextmanager
def temporary(out: Path) -> Generator[Path]:
    """A directory beside the file or directory `out`, for as long as that is written."""
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent) as directory:
        yield Path(directory)


def write(to: Format, rows: Iterable[Row], path: Path, images: Images | None = None) -> None:
    """Rows of token ids; `images`: how they hold images, if any has some."""
    if to == "jsonl":
        write_jsonl(rows, path)
    else:
        typed = {"parquet": write_parquet, "datasets": write_hub, "trl": write_dataset}[to]
        typed(rows, path, sft=to == "trl", images=images)


def write_jsonl(rows: Iterable[Row], path: Path) -> None:
    """One JSON object a line; NaN is null."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as stream:
        for row in rows:
            stream.write(encoder.encode(row) + b"\n")


def write_parquet(
    rows: Iterable[Row], path: Path, *, sft: bool = False, images: Images | None = None, shape: TextShape | None = None
) -> None:
    """Row groups of bounded size."""
    module = parquet_module()
    arrow = importlib.import_module("pyarrow")
    schema = columns(arrow, sft=sft, images=images) if shape is None else text_columns(arrow, shape)
    with module.ParquetWriter(path, schema) as writer:
        for group in _groups(rows):
            writer.write_table(arrow.Table.from_pylist([flat(row) for row in group], schema=schema))


def write_hub(rows: Iterable[Row], path: Path, *, sft: bool = False, images: Images | None = None) -> None:
    """A directory for `datasets.load_dataset`, laid out as the Hub has it; its card is README.md."""
    datasets_module()
    (path / "data").mkdir(parents=True)
    write_parquet(rows, path / _SHARD, sft=sft, images=images)


def features_of(path: Path) -> Any:
    return datasets_module().Features.from_arrow_schema(parquet_module().read_schema(path / _SHARD))


def write_dataset(
    rows: Iterable[Row], path: Path, *, sft: bool = False, images: Images | None = None, shape: TextShape | None = None
) -> None:
    """A directory for `datasets.load_from_disk`."""
    module = datasets_module()
    with temporary(path) as work:
        write_parquet(rows, work / "rows.parquet", sft=sft, images=images, shape=shape)
        bars = module.are_progress_bars_disabled()
        module.disable_progress_bars()
        try:
            found = module.Dataset.from_parquet(str(work / "rows.parquet"), cache_dir=str(work / "cache"))
            found.save_to_disk(str(path))
        finally:
            if not bars:
                module.enable_progress_bars()


def datasets_module() -> Any:
    """`datasets`; raises DataError if it isn't installed."""
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise DataError(f"this needs Hugging Face datasets: {how_to_install('data')}; jsonl needs nothing") from error


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    tokens = num_bytes = 0
    for row in rows:
        group.append(row)
        tokens += len(row.get("labels", ()))
        num_bytes += sum(len(image.get("bytes", b"")) for image in row.get("images", ()))
        if len(group) == _MOST_ROWS or tokens >= _MOST_TOKENS or num_bytes >= _MOST_BYTES:
            yield group
            group, tokens, num_bytes = [], 0, 0
    if group:
        yield group
