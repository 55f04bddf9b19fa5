"""Exports a run's sequences to files that other programs read.

    history ──┐
              ├─▶ read_run ─▶ Exported ─▶ full_row | sft_row ─▶ write_jsonl | write_parquet | write_dataset ─▶ PATH
    rollouts ─┘

- Oldest first. Streamed in bounded memory, written to a temporary path and renamed when complete.
- Arrays of a row have one item per token, prompt first: a missing value is 0, a missing version -1.
- Parquet and datasets have typed columns (`columns`); fields without a fixed shape (`JSON_COLUMNS`) are JSON text.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from sluice.consumers.history.files import consumer_files
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceDetail
from sluice.consumers.pack import IGNORED
from sluice.consumers.run_files import HISTORY, ROLLOUTS
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.task import TextCodec
from sluice.consumers.training.step_log import read_rollouts
from sluice.pipeline.errors import DataError, ModelError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.prompts.rows import parquet_module
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample

Format = Literal["jsonl", "parquet", "datasets", "trl"]
Kind = Literal["trained", "handed-on"]
JSON_COLUMNS = ("stop_reason", "truth", "metrics", "metadata", "triggers", "sampling")
Row = dict[str, Any]
_MOST_ROWS = 256
_MOST_TOKENS = 1 << 18  # per Parquet row group: about 10 arrays each


@dataclass
class Exports:
    """Counts of one export."""

    sequences: int = 0
    without_weight: int = 0  # trl skips them: none of their tokens has a weight
    weighted: int = 0  # weights other than 0 and 1, which trl's labels can't express


def export_run(directory: Path, to: Format, out: Path, kind: Kind, model: str) -> Exports:
    """Write the run's sequences; `model` is the directory with its tokenizer. Raises DataError."""
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


@dataclass(frozen=True)
class Exported:
    """One sequence; `result` is the worker's output, if the history has it."""

    sample: TrainingSample
    result: SequenceResult | None = None
    step: int | None = None  # the step that trained it
    version: int | None = None  # weights that the step started from


def read_run(directory: Path, kind: Kind) -> Iterator[Exported]:
    """Yields at least one; raises DataError with the cause if there are none."""
    history = directory / HISTORY
    found = _from_history(history, kind)
    first = next(found, None)
    if first is None and kind == "trained":
        found = _from_rollouts(directory / ROLLOUTS)
        first = next(found, None)
    if first is None:
        raise DataError(f"{directory}: nothing to export; {_why(history, kind)}")
    return chain([first], found)


def _from_history(directory: Path, kind: Kind) -> Iterator[Exported]:
    with closing(HistoryReader(directory)) as reader:
        for detail in reader.handed_on():
            if detail.sample is not None and (kind == "handed-on" or _is_trained(detail)):
                yield _exported(detail, detail.sample)


def _is_trained(detail: SequenceDetail) -> bool:
    return detail.trained is not None and detail.trained.state == "trained"


def _exported(detail: SequenceDetail, sample: TrainingSample) -> Exported:
    """As trained, if it was: the trainer may have filled in more proximal logprobs than the consumer had."""
    trained = detail.trained
    if trained is None:
        return Exported(sample, detail.result)
    if trained.proximal_logprobs:
        scores = {"proximal_logprobs": trained.proximal_logprobs, "proximal_versions": trained.proximal_versions}
        sample = replace(sample, **scores)
    return Exported(sample, detail.result, trained.step, trained.version)


def _from_rollouts(directory: Path) -> Iterator[Exported]:
    for step, batch in read_rollouts(directory):
        yield from (Exported(sample, step=step) for sample in batch.samples)


def _why(history: Path, kind: Kind) -> str:
    if not consumer_files(history):
        return "it has no history; run with history.enabled: true, or with trainer.keep_rollouts (null: all steps)"
    with closing(HistoryReader(history)) as reader:
        handed_on = reader.totals()["handed_on"]
    if handed_on and kind == "trained":
        return f"{handed_on} sequences were handed on and none has been trained yet; --source handed-on exports those"
    return "no sequence was handed to a trainer yet; check the progress with `sluice status`"


def full_row(one: Exported, codec: TextCodec | None) -> Row:
    """All fields; token texts need `codec` and are None without it."""
    sample, ids = one.sample, list(one.sample.token_ids)
    texts = {"prompt": ids[: sample.prompt_len], "target": ids[sample.prompt_len :]}
    return {
        "seq_id": sample.seq_id,
        "group_id": sample.group_id,
        "task": sample.task,
        "step": one.step,
        "version": one.version,
        **{name: None if codec is None else codec.decode(part) for name, part in texts.items()},
        **_of_result(one),
        "reward": sample.reward,
        "advantage": sample.advantage,
        "metrics": sample.metrics,
        "enqueued_at": sample.enqueued_at,
        "temperature": sample.temperature,
        "prompt_len": sample.prompt_len,
        "token_ids": ids,
        "labels": list(sample.labels),
        "weights": list(sample.weights),
        **_per_token(sample),
    }


def _of_result(one: Exported) -> Row:
    """The worker's fields; None if only the sample is known."""
    names = (
        *("index", "rollout_id", "turn", "worker", "backend", "attempt", "text", "finish_reason", "stop_reason"),
        *("triggers", "truth", "metadata", "logprobs_mode", "sampling"),
    )
    return {name: None if one.result is None else getattr(one.result, name) for name in names}


def _per_token(sample: TrainingSample) -> Row:
    tokens = sample.sampled
    return {
        "segments": sample.segments.expand(),
        "response_mask": tokens.response_mask,
        "logprobs": tokens.logprobs,
        "versions": tokens.versions,
        "proximal_logprobs": tokens.proximal_logprobs or [0.0] * len(tokens),
        "proximal_versions": tokens.proximal_versions or [-1] * len(tokens),
    }


def sft_row(one: Exported) -> Row | None:
    """A row that TRL's SFTTrainer trains on unchanged; None if no token has a weight.

    `labels[i]` is the target at position i, as in transformers: -100 where the weight is 0.
    """
    weights = np.array(one.sample.weights, dtype=np.float32)
    weights[:1] = 0.0  # the first token has no context to predict it from
    if not weights.any():
        return None
    labels = np.where(weights != 0, np.asarray(one.sample.labels, dtype=np.int64), IGNORED)
    ids = list(one.sample.token_ids)
    return {"input_ids": ids, "labels": labels.tolist(), "attention_mask": [1] * len(ids)}


def is_plain(one: Exported) -> bool:
    """Whether labels alone express all its weights."""
    return all(weight in (0.0, 1.0) for weight in one.sample.weights[1:])


def flat(row: Row) -> Row:
    """The row with non-fixed shapes as JSON text."""
    texts = {name: msgspec.json.encode(row[name]).decode() for name in JSON_COLUMNS if row.get(name) is not None}
    return {**row, **texts}


def columns(arrow: Any, *, sft: bool) -> Any:
    """The schema of the rows; `arrow` is the module pyarrow."""
    ints, floats, text = arrow.list_(arrow.int32()), arrow.list_(arrow.float32()), arrow.string()
    if sft:
        wide = arrow.list_(arrow.int64())
        return arrow.schema([("input_ids", wide), ("labels", wide), ("attention_mask", wide)])
    kinds = {
        text: "seq_id group_id task prompt target rollout_id worker backend text finish_reason logprobs_mode",
        arrow.int64(): "step version index turn attempt prompt_len",
        arrow.float64(): "reward advantage enqueued_at temperature",
        ints: "token_ids labels segments response_mask versions proximal_versions",
        floats: "weights logprobs proximal_logprobs",
    }
    found = [(name, kind) for kind, names in kinds.items() for name in names.split()]
    return arrow.schema([*found, *((name, text) for name in JSON_COLUMNS)])


@contextlib.contextmanager
def aside(out: Path) -> Generator[Path]:
    """Yield a temporary path that is renamed to `out` at the end; raises DataError if `out` exists."""
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
    """`datasets`; raises DataError if it isn't installed."""
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
