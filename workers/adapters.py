"""The adapters that a worker serves beside the policy: loaded and proved before its first job.

    worker.adapters: {name: directory} ─▶ verify ─▶ Backend.load_adapter ─▶ jobs that name it, versions[i] = 0

- A directory is one that peft wrote, or a version of a run. A version's manifest has digests and a probe score, which
  the engine must match. Without one, `hf` compares each layer with the merged one, and vLLM must at least give
  another score than without the adapter.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import ModelError, WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights.versions import MANIFEST, named_base, read_manifest, verify
from sluice.workers.engine.adapters import AdapterRoom
from sluice.workers.engine.contracts import Backend, WeightsProbe
from sluice.workers.weights_watch import probe_of


def room_of(config: Config) -> AdapterRoom | None:
    """What the engine must have room for; None if it merges. Raises ModelError."""
    try:
        return AdapterRoom.of(config.worker, config.trainer.lora)
    except WeightsError as error:
        raise ModelError(f"worker.adapters: {error}") from error


async def load_adapters(config: Config, backend: Backend) -> None:
    """Those of the configuration. Raises ModelError for one that can't be served."""
    limit_s = config.weights.load_timeout_s
    for name, directory in config.worker.adapters.items():
        try:
            async with asyncio.timeout(limit_s):
                probe = await asyncio.to_thread(_probe, config, Path(directory), backend.facts.dtype)
                await backend.load_adapter(name, Path(directory), 0, probe)
        except TimeoutError as error:
            raise ModelError(
                f"worker.adapters.{name}: not loaded within {limit_s:.0f} s; is the disk slow or not mounted? Raise "
                "weights.load_timeout_s if loading takes longer"
            ) from error
        except WeightsError as error:
            raise ModelError(f"worker.adapters.{name}: {error}") from error
        get_logger().info("adapter loaded", name=name, directory=directory, proved=probe is not None)


def _probe(config: Config, directory: Path, dtype: str) -> WeightsProbe | None:
    """None if nothing was measured. Raises WeightsError for a damaged version."""
    if not (directory / MANIFEST).is_file():
        if not named_base(directory):
            get_logger().warning("nothing says which weights this adapter was trained on", directory=str(directory))
        return None
    manifest = msgspec.structs.replace(read_manifest(directory), path=str(directory))
    verify(manifest, Path(config.model.path))
    return probe_of(manifest, dtype, config.weights.probe_tolerance)
