"""The model in training, wherever its parts are: in this process, or on ranks that do the same at the same time.

    Trainer ─▶ Learner ──command──▶ Learner of every other rank (`follow`)
                  │                     │
                  ▼                     ▼
               TrainStep ◀─collectives─▶ TrainStep

Rank 0's methods return when all ranks have done their part. Files of the model and a checkpoint's state are rank 0's;
every rank writes the tensors that it holds (checkpoint.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from sluice.consumers.training import checkpoint, lora
from sluice.consumers.training.checkpoint import Copies, TrainerState, Unfinished
from sluice.consumers.training.images import ReceivedImages, SampleImages, SentImages
from sluice.consumers.training.model import own_tensors, probe_score, write_model
from sluice.consumers.training.ranks.group import Ranks
from sluice.consumers.training.session import Fence
from sluice.consumers.training.shards import ShardsBeside, gathered, is_sharded, save_shards
from sluice.consumers.training.snapshot import Memory, Shadow, Snapshot, rounded
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.weights.versions import Ahead
from sluice.pipeline.wire.messages import Shard, TrainingSample
from sluice.pipeline.wire.tokens import from_wire, to_wire

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_Scores = dict[str, tuple[str, bytes]]  # by seq_id: dtype, values


class Fill(Protocol):
    """Fills a model directory, in any thread: see `Snapshot.write`."""

    def __call__(self, target: Path, ahead: Ahead | None = None) -> tuple[dict[str, Shard], float]: ...


class Run(msgspec.Struct, tag=True):
    """TrainStep.run."""

    samples: list[TrainingSample]
    step: int
    version: int | None
    own: _Scores
    reference: _Scores
    images: dict[str, SentImages] = {}


class Score(msgspec.Struct, tag=True):
    """TrainStep.score."""

    samples: list[TrainingSample]
    images: dict[str, SentImages] = {}


class Probe(msgspec.Struct, tag=True):
    """The score of a version's probe."""

    token_ids: list[int]
    dtype: str


class Gather(msgspec.Struct, tag=True):
    """Rank 0 gets the tensors of a version."""


class Copy(msgspec.Struct, tag=True):
    """Rank 0 gets those of a checkpoint."""

    with_model: bool


class Save(msgspec.Struct, tag=True):
    """Every rank writes a checkpoint's tensors."""

    directory: str
    limit_s: float | None = None  # write them beside later commands; the longest that one rank waits for another


class Load(msgspec.Struct, tag=True):
    """Continue from a checkpoint."""

    directory: str


Command = Run | Score | Probe | Gather | Copy | Save | Load
_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
_decoder = msgspec.msgpack.Decoder(Command, dec_hook=from_wire)


class Learner:
    """Of one rank. The methods but `follow` are called on rank 0."""

    def __init__(
        self,
        step: TrainStep,
        source: Path,
        config: ModelConfig,
        ranks: Ranks | None = None,
        images: SampleImages | ReceivedImages | None = None,
    ) -> None:
        """`source`: the run's model directory; `ranks`, `images`: those that `step` was made for."""
        self._step, self._source, self._config, self._ranks = step, source, config, ranks
        self._taken = images if isinstance(images, SampleImages) else None
        self._received = images if isinstance(images, ReceivedImages) else None
        self._shadow: Shadow | None = None
        self._memory = Memory()
        self._stalled_s = 0.0

    @property
    def vocabulary(self) -> int:
        return int(self._step.model.config.get_text_config().vocab_size)

    def run(
        self,
        samples: Sequence[TrainingSample],
        step: int,
        *,
        version: int | None = None,
        own: Mapping[str, np.ndarray] | None = None,
        reference: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, float]:
        """As TrainStep.run."""
        with self._everywhere(
            lambda: Run(list(samples), step, version, _packed(own), _packed(reference), self._sent(samples))
        ):
            return self._step.run(samples, step, version=version, own=own, reference=reference)

    def score(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """As TrainStep.score."""
        with self._everywhere(lambda: Score(list(samples), self._sent(samples))):
            return self._step.score(samples)

    @property
    def has_adapter(self) -> bool:
        """Whether a version is an adapter."""
        return lora.has_adapter(self._step.model)

    def probe(self, token_ids: Sequence[int], dtype: str = "float32") -> float:
        """As `probe_score`, under the weights as a version of this dtype has them."""
        with self._everywhere(lambda: Probe(list(token_ids), dtype)):
            return _probe(self._step.model, token_ids, dtype)

    def write(self, directory: Path) -> None:
        """Fill a model directory."""
        if self._ranks is None:
            write_model(self._step.model, self._source, directory)
            return
        with self._everywhere(Gather):
            tensors = gathered(own_tensors(self._step.model), keep=True)
        write_model(self._step.model, self._source, directory, tensors)

    def snapshot(self, dtype: str, token_ids: Sequence[int]) -> Fill:
        """These weights as files of this dtype, whatever the next step makes of them.

        Returns what fills a model directory, in any thread, as `Snapshot.write` does: (size and digest of its weights'
        files, score of the probe `token_ids`).
        """
        model = self._step.model
        if self._ranks is None and not is_sharded(model):
            self._shadow = shadow = self._shadow or Shadow(model)
            found = Snapshot(
                model, _DTYPES[dtype], lambda tensors: shadow.score(tensors, token_ids), memory=self._memory
            )
        else:
            measured = self.probe(token_ids, dtype)
            with self._everywhere(Gather):
                tensors = gathered(own_tensors(model), keep=True)
            found = Snapshot(model, _DTYPES[dtype], lambda _: measured, tensors=tensors, memory=self._memory)

        def before_update() -> None:
            started = time.monotonic()
            found.copy()
            self._step.before_update = None
            self._stalled_s += time.monotonic() - started

        self._step.before_update = before_update
        return partial(found.write, self._source)

    def stalled_s(self) -> float:
        """For how long updates have waited for a snapshot, since the last call."""
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        return stalled_s

    def save(self, root: Path, state: TrainerState, fence: Fence, written: Path | None) -> None:
        """A checkpoint, durable with what every rank holds; `written` as in `Unfinished`."""
        model, optimizer = self._step.model, self._step.optimizer
        given: dict[str, Any] = {} if self._ranks is None else self._parts(written is None, None)
        checkpoint.save(root, model, optimizer, state, self._source, fence, written=written, **given)

    def begin(self, root: Path, step: int, written: Path | None, limit_s: float) -> Unfinished:
        """The same up to where the model may change; to `complete` it, a rank waits `limit_s` for the others."""
        model, optimizer = self._step.model, self._step.optimizer
        given = self._parts(written is None, limit_s)
        return Unfinished(root, step, model, optimizer, self._source, written=written, **given)

    def _parts(self, with_model: bool, limit_s: float | None) -> dict[str, Any]:
        """What a checkpoint consists of: on several ranks shards; else, and of adapters, copies."""
        if self._ranks is not None and not lora.has_adapter(self._step.model):
            return {"shards": lambda directory: self._shards(directory, limit_s)}
        with self._everywhere(lambda: Copy(with_model)):
            return {"copies": self._copies(with_model, keep=True)}

    def _shards(self, directory: Path, limit_s: float | None) -> Callable[[], None]:
        with self._everywhere(lambda: Save(str(directory), limit_s)):
            beside = self._save(directory, limit_s)
        return (lambda: None) if beside is None else lambda: self._wait(beside, limit_s)

    def _wait(self, beside: ShardsBeside, limit_s: float | None) -> None:
        assert self._ranks is not None
        assert limit_s is not None
        with self._ranks.beside("a checkpoint beside the steps"):
            beside.wait(limit_s)

    def _copies(self, with_model: bool, *, keep: bool) -> Copies:
        return Copies.of(self._step.model, self._step.optimizer, with_model=with_model, keep=keep)

    def _save(self, directory: Path, limit_s: float | None) -> ShardsBeside | None:
        """What this rank has; None once it's on disk."""
        model, optimizer = self._step.model, self._step.optimizer
        if limit_s is None:
            save_shards(directory, model, optimizer)
            return None
        assert self._ranks is not None
        return ShardsBeside(directory, model, optimizer, self._ranks.group_beside(limit_s))

    def load(self, directory: Path) -> TrainerState:
        """As `checkpoint.load`."""
        with self._everywhere(lambda: Load(str(directory))):
            return self._load(directory)

    def _load(self, directory: Path) -> TrainerState:
        return checkpoint.load(directory, self._step.model, self._step.optimizer, self._config)

    def follow(self) -> None:
        """Do this rank's part of each command until rank 0 closes the group. Raises RankLost."""
        assert self._ranks is not None
        while (raw := self._ranks.receive()) is not None:
            command = _decoder.decode(raw)
            with self._ranks.following(_name(command)):
                self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Run(samples, step, version, own, reference, images):
                self._receive(images)
                self._step.run(samples, step, version=version, own=_unpacked(own), reference=_unpacked(reference))
            case Score(samples, images):
                self._receive(images)
                self._step.score(samples)
            case Probe(token_ids, dtype):
                _probe(self._step.model, token_ids, dtype)
            case Gather():
                gathered(own_tensors(self._step.model), keep=False)
            case Copy(with_model):
                self._copies(with_model, keep=False)
            case Save(directory, limit_s):
                self._save(Path(directory), limit_s)
            case Load(directory):
                self._load(Path(directory))

    def _sent(self, samples: Sequence[TrainingSample]) -> dict[str, SentImages]:
        return {} if self._taken is None else self._taken.sent(samples)

    def _receive(self, images: dict[str, SentImages]) -> None:
        if self._received is not None:
            self._received.receive(images)

    @contextlib.contextmanager
    def _everywhere(self, command: Any) -> Generator[None]:
        """Every other rank does its part of `command()` while the block does this one's."""
        if self._ranks is None:
            yield
            return
        made: Command = command()
        with self._ranks.leading(_name(made), _encoder.encode(made)):
            yield


def _probe(model: Any, token_ids: Sequence[int], dtype: str) -> float:
    with rounded(model, _DTYPES[dtype]):
        return probe_score(model, list(token_ids))


def _name(command: Command) -> str:
    return f"step {command.step}" if isinstance(command, Run) else f"a {type(command).__name__.lower()}"


def _packed(scores: Mapping[str, np.ndarray] | None) -> _Scores:
    return {seq_id: (row.dtype.str, row.tobytes()) for seq_id, row in (scores or {}).items()}


def _unpacked(scores: _Scores) -> dict[str, np.ndarray]:
    return {seq_id: np.frombuffer(raw, dtype=np.dtype(kind)) for seq_id, (kind, raw) in scores.items()}
