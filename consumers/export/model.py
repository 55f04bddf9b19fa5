"""A version's weights as a model directory for other programs; an adapter is merged into its base."""

from __future__ import annotations

import shutil
from pathlib import Path

from msgspec.structs import replace

from sluice.consumers.export.files import aside
from sluice.consumers.run_files import WEIGHTS
from sluice.consumers.training import lora
from sluice.consumers.training.model import HANDOFF_FILE, read_model, write_model
from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import DataError, ModelError
from sluice.pipeline.weights.carriers import Directory
from sluice.pipeline.weights.versions import MANIFEST, base_in, numbered_directories, read_manifest


def export_model(directory: Path, out: Path, config: ModelConfig, version: int | None = None) -> int:
    """Write a version of the run, by default the newest on disk; returns its number.

    Raises DataError, WeightsError (damaged, or another base), ModelError.
    """
    root = directory / WEIGHTS
    found = dict(numbered_directories(root))
    number = max(found, default=None) if version is None else version
    if number is None or number not in found:
        there = f"it has {', '.join(map(str, found))}" if found else "it has none"
        raise DataError(f"{root}: no version{'' if number is None else f' {number}'} on disk; {there}")
    manifest = replace(read_manifest(found[number]), path=str(found[number]))
    base = base_in(root, manifest, config.path) if manifest.base else None
    Directory(root, base).fetch(manifest)
    with aside(out) as path:
        if base is None:
            shutil.copytree(found[number], path, ignore=shutil.ignore_patterns(MANIFEST, HANDOFF_FILE))
            return number
        try:
            model = lora.merge(read_model(base, replace(config, device="cpu")), found[number])
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"{base}: cannot be loaded ({error})") from error
        path.mkdir()
        write_model(model, base, path)
    return number
