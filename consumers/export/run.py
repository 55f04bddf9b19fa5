"""`sluice export`: reads a run's sequences, makes a row of each, and counts what is left out.

- Oldest first, streamed in bounded memory.
- Arrays of a row have one item per token, prompt first: a missing value is 0, a missing version -1.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec.structs import replace

from sluice.consumers.export.card import Facts, card
from sluice.consumers.export.files import Format, Images, Row, aside, features_of, temporary, write, write_dataset
from sluice.consumers.export.images import ExportedImages, NotText, TextRows, contents, copies, references
from sluice.consumers.export.texts import LEFT_OUT as NO_TEXT
from sluice.consumers.export.texts import TextShape, TextShapes
from sluice.consumers.history.files import consumer_files
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceDetail
from sluice.consumers.pack import IGNORED, ce_weights
from sluice.consumers.run_files import HISTORY, ROLLOUTS
from sluice.consumers.samples import image_token_of
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.tasks.task import TextCodec
from sluice.consumers.training.step_log import read_rollouts
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ConfigError, DataError, ModelError, RequestError
from sluice.pipeline.images.store import images_of_run
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample

Kind = Literal["trained", "handed-on"]
Shape = Literal["tokens", "completion", "preference", "unpaired"]
"""Of `--to trl`: token ids and labels, or one of the TextShapes."""
_FETCHED_ROWS = 32  # rows whose images are fetched together


LEFT_OUT = {
    "no_weight": "none of their tokens has a cross-entropy weight; --to trl --shape completion exports them as texts",
    "image_failed": "an image is gone, changed or not accepted; --images references exports them without copies",
    "gaps": "tokens without a weight between the trained ones; --to datasets exports them with their weights",
    "relabelled": "labels other than the tokens; --to datasets exports them with their labels",
    "late_image": "an image after the first trained token, where TRL takes none",
    "reads_differently": "text that doesn't say where their images are",
    **NO_TEXT,
}
"""Why sequences aren't exported."""


@dataclass
class Exports:
    """Counts of one export."""

    sequences: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])  # by rule
    first: dict[str, str] = field(default_factory=dict[str, str])  # rule → its first case
    weighted: int = 0  # weights other than 0 and 1, which trl can't express
    reread: int = 0  # of trl as text: it is tokenised to other ids
    shape: Shape = "tokens"  # of trl
    facts: Facts = field(default_factory=Facts)  # of datasets, for its card

    def leave(self, rule: str, one: Exported, why: str = "") -> None:
        """Count one."""
        self.left_out[rule] += 1
        self.first.setdefault(rule, f"{one.sample.seq_id}{why and ': '}{why}")

    def reasons(self) -> dict[str, str]:
        """What was left out, by rule. Names no file and no sequence: the card, which is published, has it too."""
        return {rule: f"{count} left out: {LEFT_OUT[rule]}" for rule, count in self.left_out.items()}

    def lines(self) -> Iterator[str]:
        """What was left out or can't be expressed, for the terminal."""
        for rule, reason in self.reasons().items():
            yield f"{reason}; first: {self.first[rule]}"
        if self.weighted:
            yield f"{self.weighted} have weights other than 0 and 1; labels cannot express those: they count as 1"
        if self.reread:
            yield f"{self.reread} have a text that is tokenised differently than their tokens were"


def export_run(
    directory: Path,
    to: Format,
    out: Path,
    kind: Kind,
    config: Config,
    images: Images = "copies",
    shape: Shape | None = None,
    license: str | None = None,
) -> Exports:
    """Write the run's sequences. Raises DataError; SourceUnavailable if images can't be read now.

    `license`: of datasets, for its card.
    `shape`: None is `tokens`, or `completion` where no token has a weight, as with a policy loss alone.
    """
    if to == "trl" and images == "references":
        raise ConfigError("--images references: TRL takes the images themselves; leave it out, or use --to datasets")
    if shape is not None and to != "trl":
        raise ConfigError(f"--shape {shape} is for --to trl")
    if license is not None and to != "datasets":
        raise ConfigError(f"--license {license} is for --to datasets: the other formats have no card to write it in")
    done = Exports(shape=_shape(directory, kind, shape) if to == "trl" else "tokens")
    if done.shape != "tokens":
        with aside(out) as path:
            _write_texts(read_run(directory, kind), path, done, done.shape, config)
        return done
    found = read_run(directory, kind)
    has_images = _may_have_images(config) and any(one.sample.images for one in read_run(directory, kind))
    with ExitStack() as scope:
        path = scope.enter_context(aside(out))
        if not has_images:
            write(to, _some(_rows(to, _without_images(found), done, config), done), path)
        elif images == "references":
            rows = _rows(to, ((one, references(one.sample)) for one in found), done, config)
            write(to, _some(rows, done), path, images)
        else:
            limits = images_of_run(replace(config, run_dir=str(directory.parent), run=directory.name))
            folder = out.with_name(f"{out.stem}-images")
            files = scope.enter_context(aside(folder) if to == "jsonl" else temporary(out))
            given = _with_images(found, scope.enter_context(ExportedImages(limits, files)), done)
            if to == "trl":
                rows = _text_rows(given, done, scope.enter_context(TextRows(config)))
            elif to == "jsonl":
                rows = _rows(to, ((one, copies(its, folder.name)) for one, its in given), done, config)
            else:
                rows = _rows(to, ((one, contents(its)) for one, its in given), done, config)
            write(to, _some(rows, done), path, images)
        if to == "datasets":
            told = {
                "left_out": list(done.reasons().values()),
                "license": license,
                "command": _command(directory, out, kind, images, license),
            }
            (path / "README.md").write_text(card(done.facts, features_of(path), config, directory, **told))
    return done


def _command(directory: Path, out: Path, kind: Kind, images: Images, license: str | None) -> str:
    """What wrote the export, less what is a default; paths by their last part."""
    options = [
        *(["--source", kind] if kind != "trained" else []),
        *(["--images", images] if images != "copies" else []),
    ]
    options += [] if license is None else ["--license", license]
    return shlex.join(["sluice", "export", directory.name, "--to", "datasets", *options, "--out", out.name])


def _shape(directory: Path, kind: Kind, asked: Shape | None) -> Shape:
    if asked is not None:
        return asked
    found = (one.sample for one in read_run(directory, kind))
    is_policy_alone = all(sample.reward is not None and not ce_weights(sample).any() for sample in found)
    return "completion" if is_policy_alone else "tokens"


def _write_texts(found: Iterable[Exported], path: Path, done: Exports, shape: TextShape, config: Config) -> None:
    texts = TextShapes(shape, HFTextCodec(config.model.path))

    def rows() -> Iterator[Row]:
        for row in texts.rows((one.sample, one.result) for one in found):
            if isinstance(row, tuple):
                done.leave(row[0], Exported(row[1]))
            else:
                done.sequences, done.reread = done.sequences + 1, texts.reread
                yield row

    write_dataset(_some(rows(), done), path, shape=shape)


def _some(rows: Iterable[Row], done: Exports) -> Iterator[Row]:
    """Raises DataError if all were left out."""
    yield from rows
    if not done.sequences:
        raise DataError(f"nothing to export: {'; '.join(done.lines())}")


def _may_have_images(config: Config) -> bool:
    """False if the model takes none: the consumer drops sequences with images then."""
    return image_token_of(config.model) is not None or not (Path(config.model.path) / "config.json").is_file()


def _without_images(found: Iterator[Exported]) -> Iterator[tuple[Exported, None]]:
    for one in found:
        if one.sample.images:
            raise DataError(
                f"{one.sample.seq_id} is the run's first sequence with images, and just ended; export again"
            )
        yield one, None


def _with_images(
    found: Iterator[Exported], images: ExportedImages, done: Exports
) -> Iterator[tuple[Exported, list[Path]]]:
    while few := list(islice(found, _FETCHED_ROWS)):
        images.fetch(one.sample for one in few)
        for one in few:
            try:
                yield one, images.files(one.sample)
            except RequestError as error:
                done.leave("image_failed", one, str(error))


def _rows(
    to: Format, found: Iterable[tuple[Exported, list[Row] | None]], done: Exports, config: Config
) -> Iterator[Row]:
    codec = None if to == "trl" else _codec(config.model.path)
    for one, images in found:
        row = sft_row(one) if to == "trl" else full_row(one, codec)
        if row is None:
            done.leave("no_weight", one)
            continue
        done.sequences += 1
        done.weighted += to == "trl" and not is_plain(one)
        if to == "datasets":
            done.facts.add(one.sample, one.result, one.step)
        yield row if images is None else {**row, "images": images}


def _text_rows(found: Iterable[tuple[Exported, list[Path]]], done: Exports, texts: TextRows) -> Iterator[Row]:
    for one, files in found:
        try:
            row = texts.row(one.sample, files)
        except NotText as error:
            done.leave(error.rule, one, str(error))
        except RequestError as error:
            done.leave("image_failed", one, str(error))
        else:
            done.sequences += 1
            done.weighted += not is_plain(one)
            done.reread = texts.reread
            yield row


def _codec(model: str) -> HFTextCodec | None:
    try:
        return HFTextCodec(model)
    except ModelError as error:
        get_logger().warning("`prompt` and `target` stay empty: the run's tokenizer cannot be read", cause=str(error))
        return None


@dataclass(frozen=True)
class Exported:
    """One sequence, as trained if it was; `result` is the worker's output, if the history has it."""

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
            sample, trained = detail.as_trained, detail.trained
            if sample is None or not (kind == "handed-on" or _is_trained(detail)):
                continue
            step, version = (None, None) if trained is None else (trained.step, trained.version)
            yield Exported(sample, detail.result, step, version)


def _is_trained(detail: SequenceDetail) -> bool:
    return detail.trained is not None and detail.trained.state == "trained"


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
    return f"no sequence was handed to a trainer; `sluice status {history.parent}` says how they ended so far"


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
    weights = ce_weights(one.sample)
    if not weights.any():
        return None
    labels = np.where(weights != 0, np.asarray(one.sample.labels, dtype=np.int64), IGNORED)
    ids = list(one.sample.token_ids)
    return {"input_ids": ids, "labels": labels.tolist(), "attention_mask": [1] * len(ids)}


def is_plain(one: Exported) -> bool:
    """Whether labels alone express all its weights."""
    return bool(np.isin(ce_weights(one.sample), (0.0, 1.0)).all())
