"""A live run's rollouts for your own training loop.

    with Rollouts("configs/text.yaml") as rollouts:
        model = AutoModelForCausalLM.from_pretrained(rollouts.model_path)
        for batch in rollouts.batches():
            …                             # loss, optimiser step
            rollouts.publish(model)       # the workers load these weights

- This process is the run's trainer: there is one at a time, and `sluice status` shows it. Its Session runs in a thread
  (session_thread.py).
- A batch from `batches` is finished by the next `publish` or `done`, never before: if the process is killed in between,
  the batch comes again. A finished one never does, wherever the process is killed.
- On several ranks (torchrun, accelerate) every rank opens Rollouts and makes the same calls in the same order. Rank 0
  has the session and does what concerns the run; each rank gets its share of a batch.
- They finish what the loop has seen, not what was fetched for it: a batch that an interrupted `batches` took is given
  again, and behind a loader, which may fetch ahead, the loop names what it has trained.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypedDict, TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedModel

from sluice.consumers.pack import IGNORED, ce_token_count, ce_weight_sum, ce_weights, shares_of
from sluice.consumers.samples import blind, letter
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.training.checkpoint import TrainerState, model_of, write_state
from sluice.consumers.training.forward import Layout, TrainerForward
from sluice.consumers.training.images import (
    IMAGE_FAILED,
    ReceivedImages,
    SampleImages,
    SentImages,
    pixels_of,
    token_type_names,
)
from sluice.consumers.training.model import model_class, probe_of, probe_tokens, stage
from sluice.consumers.training.policy.proximal import proximal_of
from sluice.consumers.training.ranks.group import Ranks
from sluice.consumers.training.ranks.launch import under_launcher
from sluice.consumers.training.session import Fence, Session, Weights
from sluice.consumers.training.session_thread import SessionThread
from sluice.consumers.training.shards import gathered
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.config.load import RESOLVED
from sluice.pipeline.errors import ConfigError, DataError, ModelError, TaskError
from sluice.pipeline.images.processor import joined_tensors
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights.versions import ADAPTER_CONFIG, Line, newest_number
from sluice.pipeline.wire.messages import DeadLetter, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, from_wire, to_wire

T = TypeVar("T")

_ONE = (
    "only one process may read a run's batches, so that each is delivered once; use DataLoader(…, batch_size=None, "
    "num_workers=0): they are prepared outside this process anyway"
)
_NOBODY = ""  # the id in a row that trains nothing
_REASON = re.compile("[a-z][a-z0-9_]{0,39}")


class Totals(TypedDict):
    """Sizes of a batch, to divide sums by."""

    samples: int
    tokens: int
    response_tokens: int  # of `response_mask`
    weight: float  # of `weights`
    weighted_tokens: int  # tokens with a weight


class Batch(TypedDict):
    """B samples of at most L tokens (prompt and response). Logprobs are natural, at `temperatures`.

    `labels[b, i]` is the target AT position i, predicted from positions before i: shift logits against labels, as
    transformers does. It may differ from `input_ids[b, i]`: the truth's label on a sampled prefix.
    """

    seq_ids: list[str]
    group_ids: list[str]
    input_ids: Tensor  # int64 [B, L]
    attention_mask: Tensor  # int64 [B, L]: 1 = a token, 0 = padding
    labels: Tensor  # int64 [B, L]; -100 where the weight is 0
    weights: Tensor  # float32 [B, L], for the cross-entropy
    prompt_lens: Tensor  # int64 [B]: the response starts here
    response_mask: Tensor  # int64 [B, L]: 1 = sampled by the policy
    logprobs: Tensor  # float32 [B, L]: under the version that sampled the token; 0 if none did
    versions: Tensor  # int64 [B, L]: that version; -1 if none did
    proximal_logprobs: Tensor  # float32 [B, L]: under proximal_versions; equal to logprobs if there is none
    proximal_versions: Tensor  # int64 [B, L]: the version after `versions`; -1 = not scored
    temperatures: Tensor  # float32 [B]
    rewards: Tensor  # float32 [B]; NaN = none
    advantages: Tensor  # float32 [B]; NaN = none
    totals: Totals  # of the whole batch, over all ranks
    vision: dict[str, Tensor]  # for model(…, **batch["vision"]): pixels, and what belongs to them; empty without images


def tensors_of(
    samples: Sequence[TrainingSample],
    pad_id: int,
    images: SampleImages | ReceivedImages | None = None,
    type_names: Sequence[str] = (),
    line: Line | None = None,
    totals: Totals | None = None,
) -> Batch:
    """Tensors of the samples, in order; `input_ids` are padded with `pad_id`.

    `totals`: of the batch that the samples are a part of. `type_names`: see `token_type_names`; `line`: see
    `proximal_of`. Raises TaskError for a sample with images if there is no `images`.
    """
    for sample in samples:
        if sample.images and images is None:
            raise TaskError(f"{sample.seq_id}: {blind(len(sample.images))}")
    weights = _rows(samples, [ce_weights(sample) for sample in samples], 0.0, torch.float32)
    labels = _rows(samples, [sample.labels for sample in samples], IGNORED, torch.int64)
    labels[weights == 0] = IGNORED
    proximal = [proximal_of(sample, line) for sample in samples]
    ones = [np.ones(len(sample.token_ids)) for sample in samples]
    return Batch(
        seq_ids=[sample.seq_id for sample in samples],
        group_ids=[sample.group_id for sample in samples],
        input_ids=_rows(samples, [sample.token_ids for sample in samples], pad_id, torch.int64),
        attention_mask=_rows(samples, ones, 0, torch.int64),
        labels=labels,
        weights=weights,
        prompt_lens=torch.tensor([sample.prompt_len for sample in samples]),
        response_mask=_rows(samples, [sample.response_mask.expand() for sample in samples], 0, torch.int64),
        logprobs=_rows(samples, [sample.logprobs for sample in samples], 0.0, torch.float32),
        versions=_rows(samples, [sample.versions.expand() for sample in samples], -1, torch.int64),
        proximal_logprobs=_rows(samples, [values for values, _ in proximal], 0.0, torch.float32),
        proximal_versions=_rows(samples, [versions for _, versions in proximal], -1, torch.int64),
        temperatures=torch.tensor([sample.temperature for sample in samples]),
        rewards=_or_nan([sample.reward for sample in samples]),
        advantages=_or_nan([sample.advantage for sample in samples]),
        totals=totals or totals_of(samples),
        vision={} if images is None else _vision(samples, images, type_names),
    )


def totals_of(samples: Sequence[TrainingSample]) -> Totals:
    """Of these."""
    return Totals(
        samples=len(samples),
        tokens=sum(len(sample.token_ids) for sample in samples),
        response_tokens=sum(sum(sample.response_mask.expand()) for sample in samples),
        weight=ce_weight_sum(samples),
        weighted_tokens=ce_token_count(samples),
    )


def _share(samples: Sequence[TrainingSample], ranks: Ranks) -> list[TrainingSample]:
    """A rank's part of a batch, at least one row: passes of ranks wait for each other."""
    own = shares_of([len(sample.token_ids) for sample in samples], ranks.size)[ranks.rank]
    return [samples[at] for at in own] or [_nothing(samples)]


def _nothing(samples: Sequence[TrainingSample]) -> TrainingSample:
    """A copy of the shortest that trains nothing."""
    least = min(samples, key=lambda sample: len(sample.token_ids))
    tokens = len(least.token_ids)
    advantage = None if least.advantage is None else 0.0
    weights, mask = FloatArray([0.0] * tokens), Runs([(0, tokens)])
    return replace(least, group_id=_NOBODY, advantage=advantage, weights=weights, response_mask=mask)


def _vision(
    samples: Sequence[TrainingSample], images: SampleImages | ReceivedImages, type_names: Sequence[str]
) -> dict[str, Tensor]:
    inputs = [images.inputs(sample) for sample in samples]
    given = [each for each in inputs if each is not None]
    if not given:
        return {}
    types = [() if each is None else each.token_types[0] for each in inputs]
    tensors = {name: torch.from_numpy(values) for name, values in joined_tensors(given).items()}
    return tensors | {name: _rows(samples, types, 0, torch.int64) for name in type_names}


def _rows(samples: Sequence[TrainingSample], values: Sequence[Any], fill: float, dtype: torch.dtype) -> Tensor:
    """An array that was never filled in is empty; its row is all `fill`."""
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    rows = torch.full((len(samples), longest), fill, dtype=dtype)
    for row, array in zip(rows, values, strict=True):
        row[: len(array)] = torch.as_tensor(np.asarray(array), dtype=dtype)
    return rows


def _or_nan(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float32)


class _Out(NamedTuple):
    """A batch that the loop was given; what it has dropped of it may still be named with the rest."""

    left: frozenset[str]
    dropped: frozenset[str] = frozenset()
    is_over: bool = False  # nothing was left of it when a later one was given

    def without(self, dropped: Collection[str]) -> _Out:
        return self._replace(left=self.left.difference(dropped), dropped=self.dropped | self.left.intersection(dropped))


class _Given(msgspec.Struct):
    """Of one batch."""

    samples: list[TrainingSample]  # none: there is no other
    line: list[int]
    images: dict[str, SentImages] = {}
    complete: bool = False


class _Done(msgspec.Struct):
    version: int
    complete: bool


_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
_json = msgspec.json.encode


def _ranks_of(config: Config) -> Ranks | None:
    """All of them, if there are several; raises ConfigError if they don't know each other yet."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if under_launcher() else 1
    if not distributed.is_initialized():
        if size > 1:
            raise ConfigError(
                f"{size} ranks were started, and there is no process group yet; call "
                "torch.distributed.init_process_group(), or make accelerate's Accelerator, before opening Rollouts"
            )
        return None
    if distributed.get_world_size() == 1:
        return None
    return Ranks(config.trainer.rank_timeout_s)


class Rollouts:
    """The trainer's side of a run; a context manager.

    `config`: a YAML file, the directory of a started run, or a Config. `overrides`: same as `--set`.
    `seen`: sequence ids that your own checkpoint holds; they aren't returned again, and count as trained.
    """

    def __init__(self, config: str | Path | Config, *, overrides: Sequence[str] = (), seen: Iterable[str] = ()) -> None:
        self.config = config if isinstance(config, Config) else _load(Path(config), overrides)
        self._source = Path(self.config.model.path)
        self._root = Path(self.config.run_dir) / self.config.run / "weights"
        self._images: SampleImages | ReceivedImages | None = None
        self._ranks: Ranks | None = None
        self._type_names: list[str] = []
        self._seen = frozenset(seen)
        self._thread = SessionThread(self.config, self._seen)
        self._complete = self._proved = False
        self._out: list[_Out] = []  # until all of it is finished or dropped
        self._ahead = False  # the loop may not have seen the last one yet
        self.version = -1  # of the newest weights; set by __enter__

    def __enter__(self) -> Rollouts:
        if not self._source.is_dir():
            raise ModelError(f"{self._source}: no such model directory; set model.path to the run's model")
        self._ranks = _ranks_of(self.config)
        self._pad_id = (HFTextCodec(self._source).eos_token_ids or [0])[0]
        others = self._ranks is not None and not self._ranks.leads
        self._images = (ReceivedImages if others else SampleImages).of(self.config, pixels_of(self.config))
        if self._images is not None:
            self._type_names = token_type_names(model_class(self._source, self.config.model))
        self.version = self._once("the start", self._open, int)
        return self

    def _open(self) -> int:
        images = self._images if isinstance(self._images, SampleImages) else None
        self._thread = SessionThread(self.config, self._seen, images)
        try:
            self._thread.start()
            return self._thread.call(lambda session: _value(session.state.version))
        except BaseException:
            self._thread.stop()
            raise

    def _once(self, name: str, work: Callable[[], T], kind: type[T], limit_s: float | None = None) -> T:
        """What the work returns: in this process, or on rank 0 for all of them.

        The others wait for it for at most `limit_s`, by default as long as the broker may be away and a version may
        take to write, and `trainer.rank_timeout_s` more.
        """
        if self._ranks is None:
            return work()
        if limit_s is None:
            limit_s = self.config.broker.retry_for_s + self.config.weights.publish_timeout_s
        told = self._ranks.told(name, lambda: _encoder.encode(work()), limit_s)
        return msgspec.msgpack.decode(told, type=kind, dec_hook=from_wire)

    def _named(self, seq_ids: Iterable[str] | None) -> list[str] | None:
        """What all ranks name."""
        own = None if seq_ids is None else list(seq_ids)
        if self._ranks is None:
            return own
        all_of = [msgspec.json.decode(one, type=list[str] | None) for one in self._ranks.joined("names", _json(own))]
        if all(one is None for one in all_of):
            return None
        return sorted({seq_id for one in all_of for seq_id in one or ()} - {_NOBODY})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._thread.alive and (left := self._thread.call(lambda one: _value(one.given))):
            get_logger().warning(
                "delivered but not finished by publish or done; they will be delivered again", samples=len(left)
            )
        self._thread.stop()
        if kind is None and not self._complete:
            self._thread.check()

    @property
    def model_path(self) -> Path:
        """Directory of the newest weights, to start or resume from: they include everything that `publish` finished."""
        found = model_of(self._root.parent) or self._source
        if (found / ADAPTER_CONFIG).is_file():
            raise ConfigError(
                f"{found}: the built-in trainer left an adapter (trainer.lora); merge it with `sluice export --to "
                "model`, and start a run of another name from that directory (--set run=NAME --model DIRECTORY)"
            )
        return found

    def batches(self, *, ahead: bool = False) -> Iterator[Batch]:
        """Batches of `producer.samples_per_version` samples, fewer in the last one, until the run ends.

        Waits for at most `trainer.batch_wait_s`, then raises DeadlineExceeded. `ahead`: something between this iterator
        and your loop may fetch more than the loop has seen, so `publish` and `done` don't guess: with several batches
        out they must be told which to finish.
        """
        while not self._complete:
            given = self._once("a batch", self._next, _Given, math.inf)  # `take` has its own deadline
            self._complete |= given.complete
            if not given.samples:
                return
            batch = self._tensors(given)
            self._ahead = ahead or (self._ahead and bool(self._out))
            # Nothing between this line and the yield may be interrupted: from here on the loop has the batch.
            before = [one._replace(is_over=not one.left) for one in self._out]
            self._out = [*before, _Out(frozenset(sample.seq_id for sample in given.samples))]
            yield batch

    def _next(self) -> _Given:
        while not self._complete:
            known = frozenset[str]().union(*(one.left for one in self._out))
            taken = self._thread.call(lambda session, known=known: _take(session, known))
            if samples := self._seeable(taken):
                line = self._thread.call(lambda session: _value(session.state.line))
                sends = self._ranks is not None and isinstance(self._images, SampleImages)
                images = self._images.sent(samples) if sends and isinstance(self._images, SampleImages) else {}
                return _Given(samples, list(line.numbers), images)
            if not taken:
                if not self._thread.call(lambda session: session.complete()):
                    break  # the last samples are out, waiting for publish or done
                self._end()
        return _Given([], [], complete=self._complete)

    def prove(self, model: Any) -> None:
        """Raises ModelError unless `model`, given the batches with their attention mask, reproduces the logprobs of
        plain passes. The first `publish` does this; call it before the loop to fail before the first step. Anything but
        a transformers model (a directory, a wrapper) isn't proved, and the log says so.
        """
        if isinstance(model, PreTrainedModel):
            config = self.config.trainer
            forward = TrainerForward(
                model,
                pad_id=self._pad_id,
                row_tokens=self.config.consumer.row_tokens,
                micro_batch_tokens=config.micro_batch_tokens,
                images=self._images,
            )
            forward.prove([Layout.padded])
        else:
            get_logger().warning("not verified: only a transformers model can be", given=type(model).__name__)
        self._proved = True

    def publish(
        self, model: Any, *, metrics: Mapping[str, float] | None = None, seq_ids: Iterable[str] | None = None
    ) -> int:
        """Make `model` the next weight version and finish the batches given so far; returns its number.

        `model`: a transformers model, or a directory that its `save_pretrained` wrote. `metrics` go to the run's
        metrics.jsonl and status, next to those of the rollouts; TaskError for one that isn't a number. `seq_ids`:
        finish only these samples; required behind a loader that may have fetched more than the loop has seen. The
        first call proves the model (see `prove`).
        """
        record, named = _numbers(metrics), self._named(seq_ids)
        finishes = self._once("names", lambda: sorted(self._finishes(named)), list[str])
        if not self._proved:
            self.prove(model)
        probe = self._probe_tokens(model)
        score = probe_of(model, probe) if probe else None
        tensors = self._gathered(model)
        work = partial(self._publish, model, tensors, probe, score, record, finishes)
        done = self._once("a version", work, _Done)
        self.version = done.version
        self._finished(finishes, done.complete)
        return self.version

    def _publish(
        self,
        model: Any,
        tensors: dict[str, Tensor] | None,
        probe: list[int],
        score: float | None,
        record: dict[str, float],
        finishes: list[str],
    ) -> _Done:
        # Only after a call that was interrupted: when it ends, it removes what is staged.
        self._thread.call(lambda session: session.check_owner())
        staged = stage(model, self._source, self._root, tensors)
        # The session owns it from here on: an interrupted call doesn't delete it.
        weights = Weights(staged, probe, score, may_return=False)
        complete = self._thread.call(lambda session: _publish(session, weights, record, finishes))
        return _Done(newest_number(self._root), complete)

    def _gathered(self, model: Any) -> dict[str, Tensor] | None:
        """The state dict of a sharded model, on rank 0; None for one in one piece."""
        if not isinstance(model, torch.nn.Module) or not any(isinstance(one, DTensor) for one in model.parameters()):
            return None
        return gathered(model.state_dict(keep_vars=True), keep=self._ranks is None or self._ranks.leads)

    def drop(self, seq_ids: Iterable[str], reason: str, detail: str = "") -> None:
        """Don't train these samples from `batches`: the next `publish` or `done` counts them as dropped.

        They never come again. `reason`: one lower-case word, used by `sluice status` to count them; `detail` goes into
        their letters. Raises TaskError for a sample that wasn't returned by `batches`, or is finished.
        """
        if not _REASON.fullmatch(reason):
            raise TaskError(f"{reason!r}: a reason must be a lower-case word of at most 40 characters, such as too_old")
        letters = {seq_id: letter(seq_id, reason, detail) for seq_id in seq_ids}
        if self._ranks is not None:
            of_all = self._ranks.joined("letters", _json({one: [reason, detail] for one in letters}))
            found = [msgspec.json.decode(one, type=dict[str, tuple[str, str]]) for one in of_all]
            letters = {seq_id: letter(seq_id, *why) for one in found for seq_id, why in one.items() if seq_id}
        self._once("letters", lambda: self._drop(letters), bool)
        self._out = [one.without(letters.keys()) for one in self._out]

    def _drop(self, letters: Mapping[str, DeadLetter]) -> bool:
        self._thread.call(lambda session: _value(session.drop(letters)))
        return True

    def done(self, *, metrics: Mapping[str, float] | None = None, seq_ids: Iterable[str] | None = None) -> None:
        """The same without a version: your own checkpoint holds these batches, or nothing needs to.

        Decoding continues with the newest version, which is further behind your weights after each such call.
        """
        record, named = _numbers(metrics), self._named(seq_ids)
        finishes = self._once("names", lambda: sorted(self._finishes(named)), list[str])
        work = partial(self._thread.call, lambda session: finish(session, record, finishes))
        self._finished(finishes, self._once("a step", work, bool))

    def _finishes(self, seq_ids: Iterable[str] | None) -> frozenset[str]:
        """What a call finishes: what it names, else every batch that the loop was given."""
        given = frozenset[str]().union(*(one.left for one in self._out))
        if seq_ids is None:
            if self._ahead and (count := sum(not one.is_over for one in self._out)) > 1:
                raise TaskError(
                    f"{count} batches are out, and the loader may have fetched one ahead of your loop; name "
                    "what your weights hold, as in publish(model, seq_ids=batch['seq_ids'])"
                )
            return given
        named = frozenset(seq_ids)
        if unknown := sorted(named.difference(given, *(one.dropped for one in self._out))):
            raise TaskError(f"{unknown[0]}: not finished: it was not delivered, or is finished already")
        return named & given

    def _finished(self, seq_ids: Collection[str], complete: bool) -> None:
        self._out = [one for one in (out._replace(left=out.left - set(seq_ids)) for out in self._out) if one.left]
        if complete:
            self._end()

    def _tensors(self, given: _Given) -> Batch:
        own = given.samples if self._ranks is None else _share(given.samples, self._ranks)
        if isinstance(self._images, ReceivedImages):
            self._images.receive(given.images)
        totals, line = totals_of(given.samples), Line(given.line)
        try:
            batch = tensors_of(own, self._pad_id, self._images, self._type_names, line, totals)
        except OSError:  # a successor deletes the pixels of the trainer that it replaced
            if self._ranks is None or self._ranks.leads:
                self._thread.call(lambda session: session.check_owner())
            raise
        if own[0].group_id == _NOBODY:
            batch["seq_ids"] = [_NOBODY]
        return batch

    def _seeable(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Without those in which the policy itself wrote an image's placeholder: the model would look for the image."""
        images = self._images
        if not isinstance(images, SampleImages):
            return samples
        odd = {sample.seq_id: images.written(sample) for sample in samples if sample.images}
        letters = {
            seq_id: letter(
                seq_id,
                IMAGE_FAILED,
                f"the policy wrote {count} image placeholders itself, and a model takes each for an image",
            )
            for seq_id, count in odd.items()
            if count
        }
        if letters:
            self._thread.call(lambda session: _value(session.drop(letters)))
        return [sample for sample in samples if sample.seq_id not in letters]

    def _probe_tokens(self, model: Any) -> list[int]:
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "get_text_config"):
            return []
        vocabulary = int(config.get_text_config().vocab_size)
        return probe_tokens(vocabulary, self.config.weights.probe_tokens, self.config.seed)

    def _end(self) -> None:
        """Nothing is left to train. `sluice run` ends with its trainer, and so does the broker it started."""
        self._complete = True
        self._thread.stop(finished=True)


def _load(path: Path, overrides: Sequence[str]) -> Config:
    if not path.is_dir():
        return load_config(path, overrides)
    resolved = path / RESOLVED
    if not resolved.is_file():
        raise DataError(
            f"{path}: not a run's directory; it has no {resolved.name}. Give that file, or the run's YAML file"
        )
    return load_config(resolved, overrides)


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Convert flags and torch and NumPy scalars to numbers: logs and trackers accept nothing else."""
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError) as error:
        raise TaskError(f"metrics must be numbers ({error}); give one number per name") from error


async def _take(session: Session, known: Collection[str]) -> list[TrainingSample]:
    """What the session has given and the loop hasn't seen, because it was interrupted; else new samples."""
    unseen = [sample for sample in session.given if sample.seq_id not in known]
    return unseen or await session.take()


async def finish(session: Session, record: Mapping[str, float], finishes: Collection[str] | None = None) -> bool:
    """Make these samples, or all given ones, a step without a version; returns whether the run is complete."""
    await session.step(record, finishes=finishes)
    await session.commit(lambda state, fence: write_state(session.run_dir, state, fence))
    return await session.complete()


async def _publish(session: Session, weights: Weights, record: Mapping[str, float], finishes: Collection[str]) -> bool:
    """The same with a version, from a staged directory that is removed afterwards."""

    def save(state: TrainerState, _: Fence) -> None:  # durable with the version's files
        write_state(weights.directory, state)

    try:
        await session.step(record, finishes=finishes, empty=True)
        await session.commit(save, weights)
    finally:
        await asyncio.to_thread(shutil.rmtree, weights.directory, ignore_errors=True)
    return await session.complete()


async def _value(value: Any) -> Any:
    return value


class RolloutDataset(IterableDataset[Batch]):
    """The batches of open `rollouts`; pass it to `DataLoader(dataset, batch_size=None, num_workers=0)`."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise ConfigError(_ONE)
        return self._rollouts.batches(ahead=True)

    def __getstate__(self) -> NoReturn:  # spawned workers get a copy
        raise ConfigError(_ONE)
