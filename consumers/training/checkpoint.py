"""What a trainer resumes from: model, optimiser, random state and position in the batch stream; complete or absent.

    checkpoints/step-000012/    model.safetensors config.json …, or adapter_{model.safetensors,config.json}
                                trainer/{optimizer.safetensors, state.json, digests.json}
                                of several ranks: config.json …   trainer/{shards/, optimizer.json, state.json,
                                digests.json}
    weights/v000012/handoff.json   the same state, next to the weights that your own training loop published
    handoff.json                   what such a loop has finished since without a version; the file with the newer
                                   step wins

Your own loop can continue what the built-in trainer began. The reverse is refused: the built-in trainer has no
optimiser state for it, and its checkpoints are older than the run.

Of several ranks each writes the tensors that it has to `shards` (shards.py); adapters are small, and whole. Any number
of ranks reads either kind. With `trainer.async_checkpoints` a checkpoint is written from copies, while steps go on.

The state lists the batches that the weights were trained on, and what was dropped from them. They are acked only after
the rename, so a trainer killed at any point trains each batch once: acking twice is harmless, training twice
impossible. A file that changed after that doesn't match its digest: the previous checkpoint is used, and the damaged
one is set aside.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from sluice.consumers.training import lora
from sluice.consumers.training.model import HANDOFF_FILE, copy_settings, own_tensors, read_model, write_model
from sluice.consumers.training.optimizer import optimizer_name
from sluice.consumers.training.shards import gathered, load_shards, whole
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import ConfigError, DataError, MessageError, ModelError, WeightsError
from sluice.pipeline.files import (
    fsync_directory,
    fsync_tree,
    link_files,
    remove_directory,
    remove_unfinished,
    write_atomic,
)
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights.versions import ADAPTER_CONFIG, Line, newest_number, numbered_directories, read_manifest
from sluice.pipeline.wire.codec import read_json
from sluice.pipeline.wire.messages import DeadLetter

_STATE = Path("trainer/state.json")
_OPTIMIZER = Path("trainer/optimizer.safetensors")
_SHARDS = Path("trainer/shards")
_OPTIMIZER_NAME = Path("trainer/optimizer.json")  # beside shards
_DIGESTS = Path("trainer/digests.json")
_NAME = "optimizer"
_UNREADABLE = (
    OSError, ValueError, KeyError, RuntimeError, SafetensorError, MessageError, WeightsError, CheckpointException,
)  # fmt: skip
_RECENT_IDS = 8192
_RECENT_VERSIONS = 1024  # far more than `policy.max_token_staleness` of any use
_TOTALLED = ("rollout/repeat_terminate_triggered_sequences", "rollout/repeat_terminate_tokens_saved")


class TrainerState(msgspec.Struct, kw_only=True):
    """Everything but tensors. A shallow copy is enough: methods replace what they change."""

    step: int = 0
    version: int = 0  # the newest live one
    version_step: int | None = None  # the step whose weights it has; None: `step`
    branch: int = 0  # as in its manifest
    versions: list[int] = []  # the newest live ones; empty: all up to `version`
    num_versions: int | None = None  # live ones after the first; None: `version`
    unacked: list[tuple[str, int]] = []  # (stream id, samples) in these weights, ack possibly not sent yet
    unacked_drops: dict[str, list[DeadLetter]] = {}  # stream id -> letters of its dropped samples
    recent: list[str] = []  # newest trained sequence ids
    dropped: dict[str, str] = {}  # newest dropped sequence ids -> why
    samples: int = 0
    tokens: int = 0
    totals: dict[str, float] = {}  # of the run: the published counters in `_TOTALLED`, summed over its steps

    @property
    def line(self) -> Line:
        """The live versions."""
        return Line(self.versions) if self.versions else Line.consecutive(self.version)

    @property
    def is_published(self) -> bool:
        """Whether these weights are those of `version`."""
        return self.version_step in (None, self.step)

    @property
    def published(self) -> int:
        """Live versions after the first."""
        return self.version if self.num_versions is None else self.num_versions

    def publish(self, number: int) -> None:
        """These weights are the next version."""
        self.num_versions = self.published + 1
        self.versions = [*self.line.newest_few(_RECENT_VERSIONS - 1), number]
        if number != self.version + 1:
            self.branch = number
        self.version, self.version_step = number, self.step

    def count(self, record: dict[str, float]) -> dict[str, float]:
        """Add a step's published counters; the run's totals under `total/` keys."""
        found = {key: self.totals.get(key, 0.0) + record[key] for key in _TOTALLED if key in record}
        self.totals = {**self.totals, **found}
        return {f"total/{key}": value for key, value in self.totals.items()}

    def take(self, batches: Iterable[tuple[str, int, list[DeadLetter]]]) -> None:
        """Record batches that are now in the weights: (stream id, samples, letters of the dropped ones)."""
        for entry_id, samples, letters in batches:
            self.unacked = [*self.unacked, (entry_id, samples)]
            if letters:
                self.unacked_drops = {**self.unacked_drops, entry_id: letters}

    def remember(self, seq_ids: list[str]) -> None:
        """Keep the newest ids, to discard a batch that the broker delivers again after a power loss."""
        self.recent = (self.recent + seq_ids)[-_RECENT_IDS:]

    def remember_dropped(self, letters: Iterable[DeadLetter]) -> None:
        """The same for samples that the trainer dropped."""
        known = self.dropped | {letter.seq_id: letter.reason for letter in letters}
        self.dropped = dict(list(known.items())[-_RECENT_IDS:])


@dataclass(frozen=True)
class Copies:
    """Tensors of a model and its optimiser, whole and in the host's memory."""

    model: dict[str, torch.Tensor]  # of `own_tensors`
    optimizer: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, with_model: bool, keep: bool) -> Copies:
        """Every rank calls it, and those that don't `keep` them get none."""
        moments, parts = optimizer_tensors(optimizer), own_tensors(model) if with_model else {}
        return cls(gathered(parts, keep=keep), moments if keep else {})


class Unfinished:
    """A checkpoint in a directory that nobody reads until it's complete.

    `copies` or `shards` make it independent of the model, which may then change before `complete`.
    """

    def __init__(
        self,
        root: Path,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        source: Path,
        *,
        written: Path | None = None,
        copies: Copies | None = None,
        shards: Callable[[Path], Callable[[], None]] | None = None,
    ) -> None:
        """`written`: a directory that `write_model` has filled with this model; its files are linked.

        `shards`: makes every rank write its tensors; what it returns waits for that (`save_shards`, `ShardsBeside`).
        """
        self._root, self._target = root, root / f"step-{step:06d}"
        self._model, self._optimizer, self._source, self._copies = model, optimizer, source, copies
        self._aside = root / f".{self._target.name}.{secrets.token_hex(8)}.tmp"  # pids repeat across containers
        (self._aside / "trainer").mkdir(parents=True)
        self._has_model = written is not None
        if written is not None:
            link_files(written, self._aside)
        self._written_by_all = None if shards is None else shards(self._aside / _SHARDS)

    def complete(self, state: TrainerState, fence: Callable[[], None] = lambda: None) -> Path:
        """Write the rest; returns the checkpoint's directory once it is durable.

        `fence` is called right before the rename, and may raise to prevent it.
        """
        aside, name = self._aside, {_NAME: optimizer_name(self._optimizer)}
        if self._written_by_all is None:
            self._write_whole(name)
        else:
            if not self._has_model:
                copy_settings(self._source, aside)
            self._written_by_all()
            fsync_tree(aside / _SHARDS)
            write_atomic(aside / _OPTIMIZER_NAME, msgspec.json.encode(name))
        write_atomic(aside / _STATE, msgspec.json.encode(state))
        write_atomic(aside / _DIGESTS, msgspec.json.encode(_digests(aside)))
        fsync_tree(aside / "trainer")
        fsync_tree(aside)
        fence()
        # Fails where there is one: only a trainer that has replaced this one can have written it.
        aside.rename(self._target)
        fsync_directory(self._root)
        return self._target

    def _write_whole(self, name: dict[str, str]) -> None:
        copies = self._copies
        if not self._has_model:
            write_model(self._model, self._source, self._aside, copies.model if copies else None)
        moments = copies.optimizer if copies else optimizer_tensors(self._optimizer)
        save_file(moments, str(self._aside / _OPTIMIZER), name)


def save(
    root: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    source: Path,
    fence: Callable[[], None] = lambda: None,
    **given: Any,
) -> Path:
    """Write step `state.step` from start to end; the arguments are those of `Unfinished` and `complete`."""
    return Unfinished(root, state.step, model, optimizer, source, **given).complete(state, fence)


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint; None if none was ever written. Sets damaged ones aside, as `damaged-step-…`.

    Raises ModelError if all are damaged: starting over would train everything twice.
    """
    damaged: list[str] = []
    for directory in reversed(_all(root)):
        problem = _damage(directory)
        if problem is None:
            for name in damaged:
                aside = root / f"damaged-{name}"
                shutil.rmtree(aside, ignore_errors=True)
                (root / name).rename(aside)
                get_logger().error(
                    "a damaged checkpoint is set aside; the steps since the previous one are lost",
                    damaged=str(aside),
                    goes_on_from=directory.name,
                )
            return directory
        get_logger().error("a checkpoint is damaged", checkpoint=str(directory), problem=problem)
        damaged.append(directory.name)
    if damaged:
        raise ModelError(
            f"{root}: no intact checkpoint is left ({', '.join(reversed(damaged))}: {problem}); restore one from a "
            "backup, or start a run of another name (--set run=NAME)"
        )
    return None


def _damage(directory: Path) -> str | None:
    """How a checkpoint differs from what was saved; older releases wrote no digests, so `load` must find it."""
    file = directory / _DIGESTS
    try:
        if not file.exists() and (directory / _STATE).exists():
            return None
        saved = read_json(file.read_bytes(), dict[str, str], _DIGESTS.name)
        found = _digests(directory)
    except (OSError, MessageError) as error:
        return str(error)
    odd = sorted(name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name))
    return f"{odd[0]} differs from what was saved" if odd else None


def _digests(directory: Path) -> dict[str, str]:
    """sha256 of every file except the digest table, by path within the checkpoint."""
    digests: dict[str, str] = {}
    for file in sorted(directory.rglob("*")):
        name = file.relative_to(directory)
        if file.is_file() and name != _DIGESTS:
            with file.open("rb") as stream:
                digests[str(name)] = file_digest(stream, "sha256").hexdigest()
    return digests


def load(
    directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: ModelConfig | None = None
) -> TrainerState:
    """Fill model, optimiser and random state.

    `config`: how the model is loaded; None for the defaults. Raises ModelError for a damaged checkpoint, ConfigError
    for that of another optimiser, adapter or base.
    """
    try:
        is_sharded = (directory / _SHARDS).is_dir()
        saved_by = _saved_by(directory, is_sharded)
        if saved_by != optimizer_name(optimizer):
            raise ConfigError(
                f"{directory}: trained with trainer.optimizer {saved_by}, and {optimizer_name(optimizer)} can't "
                f"continue from its state; set it to {saved_by}, or start a run of another name from this directory "
                "(--set run=NAME --model DIRECTORY)"
            )
        state = read_json((directory / _STATE).read_bytes(), TrainerState, _STATE.name)
        settings = config or ModelConfig()
        has_adapter = lora.has_adapter(model) or (directory / ADAPTER_CONFIG).is_file()
        if has_adapter:
            lora.fill(model, directory, Path(settings.path) if settings.path else None)
        elif is_sharded:
            load_shards(directory / _SHARDS, model, optimizer)
        else:
            model.load_state_dict(read_model(directory, settings).state_dict())
        if not is_sharded:
            _fill_optimizer(optimizer, load_file(str(directory / _OPTIMIZER)))
    except _UNREADABLE as error:
        raise ModelError(
            f"{directory}: damaged checkpoint ({error}); delete it to continue from the previous one"
        ) from error
    return state


def _saved_by(directory: Path, is_sharded: bool) -> str:
    """The optimiser's name; older releases had one, and didn't write it."""
    if is_sharded:
        return read_json((directory / _OPTIMIZER_NAME).read_bytes(), dict[str, str], _OPTIMIZER_NAME.name)[_NAME]
    with safe_open(str(directory / _OPTIMIZER), framework="pt") as tensors:
        return (tensors.metadata() or {}).get(_NAME, "adamw")


def has_model(directory: Path) -> bool:
    """Whether a checkpoint has its weights as a model directory has them."""
    return any(directory.glob("*.safetensors"))


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep`, and anything a killed trainer left half-written."""
    remove_unfinished(root, ".step-*.tmp")
    for directory in _all(root)[:-keep]:
        remove_directory(directory)


def _all(root: Path) -> list[Path]:
    """Oldest first; a number may outgrow six digits."""
    return sorted(root.glob("step-*"), key=lambda path: (len(path.name), path.name))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies in the host's memory, whole; of a sharded one every rank calls it."""
    tensors = {"rng": torch.get_rng_state()}
    for index, entries in optimizer.state_dict()["state"].items():
        for name, value in _flat(entries):
            tensors[f"{index}.{name}"] = whole(value.detach()).to("cpu", copy=True)
    return tensors


def _flat(entries: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """bitsandbytes counts steps in an int, and has a dict of tensors."""
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", tensor) for inner, tensor in value.items())
        else:
            yield name, torch.tensor(value) if isinstance(value, int) else value


def _fill_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(tensors.pop("rng"))
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        outer, _, inner = name.rpartition("/")
        entries = state.setdefault(int(index), {})
        is_count = value.ndim == 0 and value.dtype == torch.int64
        (entries.setdefault(outer, {}) if outer else entries)[inner] = int(value) if is_count else value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def of_own_loop(run_dir: Path) -> Path | None:
    """A state that your own training loop has made durable; None if none has trained this run."""
    number = newest_number(run_dir / "weights")
    places = [run_dir, *([run_dir / "weights" / f"v{number:06d}"] if number > 0 else [])]  # 0: the initial model
    return next((place / HANDOFF_FILE for place in places if (place / HANDOFF_FILE).exists()), None)


def read_state(run_dir: Path) -> TrainerState:
    """What your own training loop continues from: what it made durable last, or the built-in trainer's newest
    checkpoint. Raises DataError for a damaged file.
    """
    return _durable(run_dir)[0]


def model_of(run_dir: Path) -> Path | None:
    """The directory with the weights of that state, or of the newest version before it; None before the first."""
    found = _durable(run_dir)[1]
    if found is not None and not has_model(found):
        raise ModelError(
            f"{found}: the weights are in the parts of several ranks; `sluice train` with --set "
            "trainer.publish_every=1 writes them whole at its next step"
        )
    return found


def _durable(run_dir: Path) -> tuple[TrainerState, Path | None]:
    """The newest state and the model that belongs to it."""
    root = run_dir / "weights"
    found: list[tuple[TrainerState, Path | None]] = [*_of_versions(root), *_of_checkpoints(run_dir)]
    if (without_version := _read_handoff(run_dir)) is not None:
        before, model = max(found, key=_step, default=(TrainerState(), _version_in(root, 0)))
        without_version.version = before.version
        found.append((without_version, model))
    return max(found, key=_step, default=(TrainerState(), _version_in(root, 0)))


def _step(found: tuple[TrainerState, Path | None]) -> int:
    return found[0].step


def _version_in(root: Path, number: int) -> Path | None:
    """Its directory, if it's there."""
    directory = root / f"v{number:06d}"
    return directory if directory.is_dir() else None


def _of_versions(root: Path) -> Iterator[tuple[TrainerState, Path]]:
    """The newest version of your own loop: it's durable with the version's files."""
    for number, directory in reversed(numbered_directories(root)):
        if (state := _read_handoff(directory)) is not None:
            state.version = number
            yield state, directory
            return


def _of_checkpoints(run_dir: Path) -> Iterator[tuple[TrainerState, Path]]:
    """The built-in trainer's newest; if its state is damaged, its version says which step it is."""
    root = run_dir / "weights"
    steps = {}
    for number, directory in numbered_directories(root):
        with contextlib.suppress(WeightsError):
            steps[read_manifest(directory).step] = number
    for found in reversed(_all(run_dir / "checkpoints")):
        try:
            state = read_json((found / _STATE).read_bytes(), TrainerState, _STATE.name)
        except (OSError, MessageError):
            step = int(found.name.removeprefix("step-"))
            if step not in steps:
                continue
            state = TrainerState(step=step, version=steps[step])
        yield state, (_version_in(root, state.version) if state.is_published else None) or found
        return


def write_state(directory: Path, state: TrainerState, fence: Callable[[], None] = lambda: None) -> None:
    """Atomic; `fence` as in `save`."""
    write_atomic(directory / HANDOFF_FILE, msgspec.json.encode(state), fence=fence)


def remove_unfinished_states(run_dir: Path) -> None:
    """Remove what a trainer that lost its role hasn't finished writing, so it can't put that in place any more."""
    for directory, names in (
        ("checkpoints", ".step-*.tmp"),
        ("rollouts", ".step-*.tmp"),
        ("weights", ".v*.tmp"),
        ("", f".{HANDOFF_FILE}.*.tmp"),
    ):
        remove_unfinished(run_dir / directory, names)


def _read_handoff(directory: Path) -> TrainerState | None:
    file = directory / HANDOFF_FILE
    if not file.exists():
        return None
    try:
        return read_json(file.read_bytes(), TrainerState, HANDOFF_FILE)
    except (OSError, MessageError) as error:
        raise DataError(f"{file}: cannot be read ({error}); restore it, or start a run of another name") from error
