"""A model directory of what a training loop publishes: its weights, and every other file as the run's model has it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from consumers.handoff.state import FILE
from consumers.training.model import probe_score
from pipeline.errors import ModelError
from pipeline.weights.versions import MANIFEST, tensor_table

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_NOT_COPIED = (MANIFEST, FILE)


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
