"""What a trainer resumes from: model, optimiser, random state and place in the batch stream; whole or absent.

    checkpoints/step-000012/    model.safetensors config.json …   trainer/{optimizer.safetensors, state.json,
                                digests.json}
    weights/v000012/handoff.json   the same state beside the weights that a loop of one's own published
    handoff.json                   of what such a loop finished without a version since; the newer step of the two holds

The state names the batches whose effect the weights hold, and what was dropped from them. They are acked only after
the rename, so a trainer that is killed anywhere trains each batch once: acked twice is harmless, trained twice
impossible. A file that changed after that does not match its digest: the checkpoint before is taken, and the damaged
one is set aside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from hashlib import file_digest
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sluice.consumers.training.model import probe_score, read_model, write_model
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import DataError, MessageError, ModelError
from sluice.pipeline.files import fsync_directory, fsync_tree, write_atomic
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights.versions import MANIFEST, newest_number, read_manifest, tensor_table
from sluice.pipeline.wire.codec import read_json
from sluice.pipeline.wire.messages import DeadLetter

_STATE = Path("trainer/state.json")
_OPTIMIZER = Path("trainer/optimizer.safetensors")
_DIGESTS = Path("trainer/digests.json")
_RECENT_IDS = 8192
_TOTALLED = ("rollout/repeat_terminate_triggered_sequences", "rollout/repeat_terminate_tokens_saved")


class TrainerState(msgspec.Struct, kw_only=True):
    """Everything that is not a tensor."""

    step: int = 0
    version: int = 0
    unacked: list[tuple[str, int]] = []  # (stream id, samples) inside these weights, ack perhaps not yet sent
    unacked_drops: dict[str, list[DeadLetter]] = {}  # stream id -> letters of those of its samples that were dropped
    recent: list[str] = []  # newest trained sequence ids
    dropped: dict[str, str] = {}  # newest dropped sequence ids -> why
    samples: int = 0
    tokens: int = 0
    totals: dict[str, float] = {}  # of the run: the published counters in `_TOTALLED`, summed over its steps

    def count(self, record: dict[str, float]) -> dict[str, float]:
        """Add a step's published counters; the run's totals under `total/` keys."""
        for key in _TOTALLED:
            if key in record:
                self.totals[key] = self.totals.get(key, 0.0) + record[key]
        return {f"total/{key}": value for key, value in self.totals.items()}

    def take(self, batches: Iterable[tuple[str, int, list[DeadLetter]]]) -> None:
        """Their effect is in the weights: (stream id, samples, letters of those that were dropped)."""
        for entry_id, samples, letters in batches:
            self.unacked.append((entry_id, samples))
            if letters:
                self.unacked_drops[entry_id] = letters

    def remember(self, seq_ids: list[str]) -> None:
        """Keep the newest ids, to discard a batch that a broker brings again after a power loss."""
        self.recent = (self.recent + seq_ids)[-_RECENT_IDS:]

    def remember_dropped(self, letters: Iterable[DeadLetter]) -> None:
        """The same for samples that the trainer dropped."""
        known = self.dropped | {letter.seq_id: letter.reason for letter in letters}
        self.dropped = dict(list(known.items())[-_RECENT_IDS:])


def save(
    root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainerState, source: Path
) -> Path:
    """Write step `state.step`; returns its directory once it is durable."""
    target = root / f"step-{state.step:06d}"
    aside = root / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    (aside / "trainer").mkdir(parents=True)
    write_model(model, source, aside)
    save_file(_optimizer_tensors(optimizer), str(aside / _OPTIMIZER))
    write_atomic(aside / _STATE, msgspec.json.encode(state))
    write_atomic(aside / _DIGESTS, msgspec.json.encode(_digests(aside)))
    fsync_tree(aside / "trainer")
    fsync_tree(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    fsync_directory(root)
    return target


def newest(root: Path) -> Path | None:
    """The newest whole checkpoint; None where none was ever written. Sets damaged ones aside, as `damaged-step-…`.

    Raises ModelError where all are damaged: to begin anew would train everything twice.
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
                    "a damaged checkpoint is set aside; the steps after the one before it are lost",
                    damaged=str(aside),
                    goes_on_from=directory.name,
                )
            return directory
        get_logger().error("a checkpoint is damaged", checkpoint=str(directory), problem=problem)
        damaged.append(directory.name)
    if damaged:
        raise ModelError(
            f"{root}: no whole checkpoint is left ({', '.join(reversed(damaged))}: {problem}); restore one from a "
            "backup, or start a run of another name (--set run=NAME)"
        )
    return None


def _damage(directory: Path) -> str | None:
    """Why a checkpoint is not what was saved; one of an older release has no digests, and `load` sees what it can."""
    file = directory / _DIGESTS
    try:
        if not file.exists() and (directory / _STATE).exists():
            return None
        saved = read_json(file.read_bytes(), dict[str, str], _DIGESTS.name)
        found = _digests(directory)
    except (OSError, MessageError) as error:
        return str(error)
    odd = sorted(name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name))
    return f"{odd[0]} is not what was saved" if odd else None


def _digests(directory: Path) -> dict[str, str]:
    """sha256 of every file but the table itself, by its path in the checkpoint."""
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
    """Fill model, optimiser and random state; raises ModelError for a damaged checkpoint.

    `config`: how the model is loaded; None as by default.
    """
    try:
        state = read_json((directory / _STATE).read_bytes(), TrainerState, _STATE.name)
        model.load_state_dict(read_model(directory, config or ModelConfig()).state_dict())
        _fill_optimizer(optimizer, load_file(str(directory / _OPTIMIZER)))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, MessageError) as error:
        raise ModelError(
            f"{directory}: damaged checkpoint ({error}); delete it to go on from the one before"
        ) from error
    return state


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep`, and what a killed trainer left half-written."""
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover)
    for directory in _all(root)[:-keep]:
        shutil.rmtree(directory)


def _all(root: Path) -> list[Path]:
    """Oldest first; a number may outgrow its six digits."""
    return sorted(root.glob("step-*"), key=lambda path: (len(path.name), path.name))


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {"rng": torch.get_rng_state()}
    for index, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            tensors[f"{index}.{name}"] = value.detach().clone()
    return tensors


def _fill_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(tensors.pop("rng"))
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


HANDOFF_FILE = "handoff.json"
_RECENT_GIVEN = 8192


class HandoffState(msgspec.Struct, frozen=True, kw_only=True):
    """After `step` calls of publish or done."""

    step: int = 0
    samples: int = 0
    unacked: list[tuple[str, int]] = []  # (stream id, samples); their ack was perhaps not sent
    recent: list[str] = []  # newest sequence ids that were finished

    def after(self, unacked: list[tuple[str, int]], seq_ids: list[str]) -> HandoffState:
        """One step later, with these batches finished."""
        return HandoffState(
            step=self.step + 1,
            samples=self.samples + len(seq_ids),
            unacked=[*self.unacked, *unacked],
            recent=[*self.recent, *seq_ids][-_RECENT_GIVEN:],
        )

    def acked(self) -> HandoffState:
        """Nothing waits for its ack."""
        return msgspec.structs.replace(self, unacked=[])


def read_state(run_dir: Path) -> HandoffState:
    """The newest; raises DataError for a damaged file."""
    root = run_dir / "weights"
    newest = root / f"v{newest_number(root):06d}"
    return max((_read_handoff(newest), _read_handoff(run_dir)), key=lambda state: state.step)


def write_state(directory: Path, state: HandoffState) -> None:
    """Whole or not at all."""
    write_atomic(directory / HANDOFF_FILE, msgspec.json.encode(state))


def _read_handoff(directory: Path) -> HandoffState:
    file = directory / HANDOFF_FILE
    if not file.exists():  # the built-in trainer's version, or none
        return HandoffState(step=read_manifest(directory).step if (directory / "manifest.json").exists() else 0)
    try:
        return read_json(file.read_bytes(), HandoffState, HANDOFF_FILE)
    except (OSError, MessageError) as error:
        raise DataError(f"{file}: cannot be read ({error}); restore it, or start a run of another name") from error


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_NOT_COPIED = (MANIFEST, HANDOFF_FILE)


def stage(model: Any, source: Path, root: Path) -> Path:
    """Write `model` aside in `root`; returns the directory, which the caller deletes.

    `model` has `save_pretrained` (transformers), or is the directory of a model that was saved. Raises ModelError for
    anything else, and for tensors that the run's model, `source`, does not have.
    """
    aside = root / f".v-staged.{os.getpid()}.tmp"  # what a killed process leaves, the next publish deletes
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    if isinstance(model, str | os.PathLike):
        if not Path(model).is_dir():
            raise ModelError(f"{model}: no such directory; give a model, or a directory made by save_pretrained")
        _copy(Path(model), aside)
    elif hasattr(model, "save_pretrained"):
        try:
            model.save_pretrained(aside)
        except ValueError as error:  # of its generation_config, for one
            raise ModelError(f"the model cannot be saved: {error}") from error
    else:
        raise ModelError(f"a {type(model).__name__} has no save_pretrained; give the transformers model itself")
    _check(aside, source)
    _copy(source, aside, but=_WEIGHTS)
    return aside


def stage_links(source: Path, root: Path) -> Path:
    """The run's own model, as its version 0: hard links where possible."""
    aside = root / f".v-staged.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in _files(source):
        try:
            os.link(file.resolve(), aside / file.name)
        except OSError:
            shutil.copy2(file, aside / file.name)
    return aside


def probe_of(model: Any, tokens: list[int]) -> float | None:
    """What workers hold a version against; None where its precision or its kind gives no exact score."""
    if str(getattr(model, "dtype", "")) != "torch.float32" or not callable(model):
        return None
    return probe_score(model, tokens)


def _copy(directory: Path, target: Path, but: tuple[str, ...] = ()) -> None:
    """What the target has already stays."""
    for file in _files(directory):
        if not (target / file.name).exists() and not file.name.endswith(but):
            shutil.copy2(file, target / file.name)


def _files(directory: Path) -> list[Path]:
    return [file for file in sorted(directory.iterdir()) if file.is_file() and file.name not in _NOT_COPIED]


def _check(directory: Path, source: Path) -> None:
    """Workers would refuse other tensors, each for itself and only in its log."""
    shapes = {name: shape for name, (_, shape) in tensor_table(source).items()}
    found = {name: shape for name, (_, shape) in tensor_table(directory).items()}
    odd = sorted(name for name, shape in found.items() if shapes.get(name) != shape)
    if odd:
        raise ModelError(
            f"not published: {len(odd)} tensors are not those of {source}, e.g. {odd[0]} {list(found[odd[0]])}; give "
            "the whole model, without wrappers, adapters merged"
        )
