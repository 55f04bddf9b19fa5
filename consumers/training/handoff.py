"""A live run's rollouts for your own training loop.

    with Rollouts("configs/text.yaml") as rollouts:
        model = AutoModelForCausalLM.from_pretrained(rollouts.model_path)
        for batch in rollouts.batches():
            …                             # loss, optimiser step
            rollouts.publish(model)       # the workers load these weights

- This process is the run's trainer: there is one at a time, and `sluice status` shows it.
- A batch from `batches` is finished by the next `publish` or `done`, never before: if the process is killed in between,
  the batch comes again. A finished one never does, wherever the process is killed.
- A thread owns the Session: its event loop, heartbeat and claim to the trainer's role. One request runs at a time, and
  to completion even if its caller is interrupted. Whatever ends the session (the role is taken over, the broker stays
  away) is raised by the call in progress and by every later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypedDict, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedModel

from sluice.consumers.pack import IGNORED
from sluice.consumers.samples import blind, letter
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.consumers.training.checkpoint import TrainerState, read_state, write_state
from sluice.consumers.training.forward import Layout, TrainerForward
from sluice.consumers.training.images import IMAGE_FAILED, SampleImages, joined_tensors, pixels_of, token_type_names
from sluice.consumers.training.model import model_class, probe_of, probe_tokens, stage
from sluice.consumers.training.proximal import proximal_of
from sluice.consumers.training.session import Session, Weights
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.broker.ownership import Ownership
from sluice.pipeline.config import Config, load_config
from sluice.pipeline.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    ModelError,
    SluiceError,
    TaskError,
    first_cause,
)
from sluice.pipeline.logs import get_logger
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.weights.versions import newest_number
from sluice.pipeline.wire.messages import TrainingSample

_ONE = (
    "only one process may read a run's batches, so that each is delivered once; use DataLoader(…, batch_size=None, "
    "num_workers=0): they are prepared outside this process anyway"
)
T = TypeVar("T")
_ACQUIRE_S = 20.0  # the claim of a killed trainer expires after 5
_RELEASE_S = 5.0
_POLL_S = 0.5
_REASON = re.compile("[a-z][a-z0-9_]{0,39}")
_Request = tuple[Callable[[Session], Awaitable[Any]], "Future[Any]"]


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
    proximal_versions: Tensor  # int64 [B, L]: versions + 1; -1 = not scored
    temperatures: Tensor  # float32 [B]
    rewards: Tensor  # float32 [B]; NaN = none
    advantages: Tensor  # float32 [B]; NaN = none
    vision: dict[str, Tensor]  # for model(…, **batch["vision"]): pixels, and what belongs to them; empty without images


def tensors_of(
    samples: Sequence[TrainingSample], pad_id: int, images: SampleImages | None = None, type_names: Sequence[str] = ()
) -> Batch:
    """Tensors of the samples, in order; `input_ids` are padded with `pad_id`.

    `type_names`: see `token_type_names`. Raises TaskError for a sample with images if there is no `images`.
    """
    for sample in samples:
        if sample.images and images is None:
            raise TaskError(f"{sample.seq_id}: {blind(len(sample.images))}")
    weights = _rows(samples, [sample.weights for sample in samples], 0.0, torch.float32)
    weights[:, :1] = 0.0  # the first token has no context to predict it from
    labels = _rows(samples, [sample.labels for sample in samples], IGNORED, torch.int64)
    labels[weights == 0] = IGNORED
    proximal = [proximal_of(sample) for sample in samples]
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
        vision={} if images is None else _vision(samples, images, type_names),
    )


def _vision(samples: Sequence[TrainingSample], images: SampleImages, type_names: Sequence[str]) -> dict[str, Tensor]:
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


class Rollouts:
    """The trainer's side of a run; a context manager.

    `config`: a YAML file, the directory of a started run, or a Config. `overrides`: same as `--set`.
    `seen`: sequence ids that your own checkpoint holds; they aren't returned again, and count as trained.
    """

    def __init__(self, config: str | Path | Config, *, overrides: Sequence[str] = (), seen: Iterable[str] = ()) -> None:
        self.config = config if isinstance(config, Config) else _load(Path(config), overrides)
        self._source = Path(self.config.model.path)
        self._root = Path(self.config.run_dir) / self.config.run / "weights"
        self._images: SampleImages | None = None
        self._type_names: list[str] = []
        self._seen = frozenset(seen)
        self._thread = SessionThread(self.config, self._seen)
        self._complete = self._proved = False
        self.version = -1  # of the newest weights; set by __enter__

    def __enter__(self) -> Rollouts:
        if not self._source.is_dir():
            raise ModelError(f"{self._source}: no such model directory; set model.path to the run's model")
        self._pad_id = (HFTextCodec(self._source).eos_token_ids or [0])[0]
        self._images = SampleImages.of(self.config, pixels_of(self.config))
        if self._images is not None:
            self._type_names = token_type_names(model_class(self._source, self.config.model))
        self._thread = SessionThread(self.config, self._seen, self._images)
        try:
            self._thread.start()
            self.version = self._thread.call(lambda session: _value(session.state.version))
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._thread.alive and (left := self._thread.call(lambda one: _value(one.unfinished))):
            get_logger().warning(
                "delivered but not finished by publish or done; they will be delivered again", samples=left
            )
        self._thread.stop()
        if kind is None and not self._complete:
            self._thread.check()

    @property
    def model_path(self) -> Path:
        """Directory of the newest version, to start or resume from: it includes everything that `publish` finished."""
        return self._root / f"v{number:06d}" if (number := newest_number(self._root)) >= 0 else self._source

    def batches(self) -> Iterator[Batch]:
        """Batches of `producer.samples_per_version` samples, fewer in the last one, until the run ends.

        Waits for at most `trainer.batch_wait_s`, then raises DeadlineExceeded.
        """
        while not self._complete:
            taken = self._thread.call(lambda session: session.take())
            if samples := self._seeable(taken):
                yield self._tensors(samples)
            elif taken:
                continue
            elif self._thread.call(lambda session: session.complete()):
                self._end()
            else:
                return  # the last samples are out, waiting for publish or done

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

    def publish(self, model: Any, *, metrics: Mapping[str, float] | None = None) -> int:
        """Make `model` the next weight version, then finish the samples taken so far; returns its number.

        `model`: a transformers model, or a directory that its `save_pretrained` wrote. `metrics` go to the run's
        metrics.jsonl and status, next to those of the rollouts; TaskError for one that isn't a number. The first call
        proves the model (see `prove`).
        """
        record = _numbers(metrics)
        if not self._proved:
            self.prove(model)
        staged = stage(model, self._source, self._root)
        try:
            probe = self._probe_tokens(model)
            score = probe_of(model, probe) if probe else None
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        # The session owns it from here on: an interrupted call doesn't delete it.
        weights = Weights(staged, probe, score)
        complete = self._thread.call(lambda session: _publish(session, weights, record))
        self.version = newest_number(self._root)
        self._end_if(complete)
        return self.version

    def drop(self, seq_ids: Iterable[str], reason: str, detail: str = "") -> None:
        """Don't train these samples from `batches`: the next `publish` or `done` counts them as dropped.

        They never come again. `reason`: one lower-case word, used by `sluice status` to count them; `detail` goes into
        their letters. Raises TaskError for a sample that wasn't returned by `batches`, or is finished.
        """
        if not _REASON.fullmatch(reason):
            raise TaskError(f"{reason!r}: a reason must be a lower-case word of at most 40 characters, such as too_old")
        letters = {seq_id: letter(seq_id, reason, detail) for seq_id in seq_ids}
        self._thread.call(lambda session: _value(session.drop(letters)))

    def done(self, *, metrics: Mapping[str, float] | None = None) -> None:
        """Finish the samples taken so far without a version: your own checkpoint holds them, or nothing needs to.

        Decoding runs ahead by at most `producer.max_staleness` versions: without `publish` it stops.
        """
        record = _numbers(metrics)
        self._end_if(self._thread.call(lambda session: finish(session, record)))

    def _tensors(self, samples: list[TrainingSample]) -> Batch:
        try:
            return tensors_of(samples, self._pad_id, self._images, self._type_names)
        except OSError:  # a successor deletes the pixels of the trainer that it replaced
            self._thread.call(lambda session: session.check_owner())
            raise

    def _seeable(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Without those in which the policy itself wrote an image's placeholder: the model would look for the image."""
        images = self._images
        if images is None:
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

    def _end_if(self, complete: bool) -> None:
        if complete:
            self._end()

    def _end(self) -> None:
        """Nothing is left to train. `sluice run` ends with its trainer, and so does the broker it started."""
        self._complete = True
        self._thread.stop(finished=True)


def _load(path: Path, overrides: Sequence[str]) -> Config:
    if not path.is_dir():
        return load_config(path, overrides)
    resolved = path / "config.resolved.yaml"
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


async def finish(session: Session, record: Mapping[str, float]) -> bool:
    """Make the given samples a step without a version; returns whether the run is complete."""
    await session.step(record)
    await session.commit(lambda state: write_state(session.run_dir, state), publish=False)
    return await session.complete()


async def _publish(session: Session, weights: Weights, record: Mapping[str, float]) -> bool:
    """The same with a version, from a staged directory that is removed afterwards."""

    def save(state: TrainerState) -> Weights:
        write_state(weights.directory, state)
        return weights

    try:
        await session.step(record, empty=True)
        await session.commit(save)
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
        return self._rollouts.batches()

    def __getstate__(self) -> NoReturn:  # spawned workers get a copy
        raise ConfigError(_ONE)


class SessionThread:
    """Open from the end of `start` to `stop`, or until `call` raises why it ended."""

    def __init__(self, config: Config, seen: Iterable[str], images: SampleImages | None = None) -> None:
        self._config, self._seen, self._images = config, seen, images
        self._thread = threading.Thread(target=self._main, name="sluice-handoff", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._opened: Future[Any] = Future()
        self._requests: asyncio.Queue[_Request | None] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._error: BaseException | None = None
        self._finished = False

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Connect and claim the role; raises whatever prevents it."""
        self._thread.start()
        self._await(self._opened)

    def call(self, work: Callable[[Session], Awaitable[T]]) -> T:
        """Run it in the session's loop; raises what it raises, or what ended the session."""
        answer: Future[Any] = Future()
        self._post((work, answer))
        return cast(T, self._await(answer))

    def stop(self, *, finished: bool = False) -> None:
        """Release the role and leave once the request in progress has ended; logs when that takes too long."""
        self._finished = finished
        if self._thread.is_alive() and self._loop is not None:
            with contextlib.suppress(SluiceError):  # it ended meanwhile
                self._post(None)
        if self._thread.ident is not None:
            self._thread.join(self._config.up.stop_grace_s)
        if self._thread.is_alive():
            get_logger().error("did not stop in time; abandoned", grace_s=self._config.up.stop_grace_s)

    def check(self) -> None:
        """Raise what ended the session, if anything did."""
        if self._error is not None:
            raise self._error

    def _ask_to_stop(self) -> None:
        self._stop.set()
        if not self._opened.done() and self._task is not None:
            self._task.cancel()  # it may wait a long time for the broker

    def _post(self, request: _Request | None) -> None:
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            raise self._why()
        try:
            if request is None:
                loop.call_soon_threadsafe(self._ask_to_stop)
            loop.call_soon_threadsafe(self._requests.put_nowait, request)
        except RuntimeError as error:  # the loop was closed in between
            raise self._why() from error

    def _await(self, answer: Future[Any]) -> Any:
        while not wait([answer], _POLL_S).done:
            if not self._thread.is_alive() and not answer.done():
                raise self._why()
        if answer.cancelled():
            self._thread.join(_RELEASE_S)
            raise self._why()
        return answer.result()

    def _why(self) -> BaseException:
        return self._error or SluiceError(
            "the rollouts are closed; open them again with `with Rollouts(…) as rollouts`"
        )

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = first_cause(error)

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        name, trackers = default_name("trainer"), Trackers(self._config)
        async with contextlib.AsyncExitStack() as scope:
            role = await scope.enter_async_context(role_process(self._config, "trainer", name, self._stop))
            await scope.enter_async_context(trackers)
            owner = Ownership(role.client, role.keys, "trainer")
            await _acquire(owner, role)
            if self._images is not None:  # not before: another trainer may still be reading its own
                await scope.enter_async_context(self._images)
            keeping = role.spawn(owner.keep())
            session = Session(role, owner, trackers, self._seen, self._images)
            state = await asyncio.to_thread(read_state, session.run_dir)
            is_new = newest_number(session.root) < 0
            await session.open(state, Weights(Path(self._config.model.path)) if is_new else None)
            self._opened.set_result(None)
            while (request := await self._requests.get()) is not None:
                await _answer(session, *request)
            await session.close()
            if self._images is not None:  # before the next trainer starts
                await self._images.close()
            if self._finished:
                await cast("Awaitable[bool]", role.client.set(role.keys.state, "finished"))
            keeping.cancel()  # otherwise its next claim could follow the release
            await asyncio.wait({keeping}, timeout=_RELEASE_S)
            async with asyncio.timeout(_RELEASE_S):
                await owner.release()


async def _acquire(owner: Ownership, role: Role) -> None:
    try:
        await owner.acquire(_ACQUIRE_S, role.status.waiting)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{error}; is the run's own trainer running? `sluice run` and `up` start none with --set "
            "trainer.external=true"
        ) from error


async def _answer(session: Session, work: Callable[[Session], Awaitable[Any]], answer: Future[Any]) -> None:
    try:
        answer.set_result(await work(session))
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except BaseException as error:
        answer.set_exception(error)
