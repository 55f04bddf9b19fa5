"""Pulls new weight versions into a worker's engine, between two tokens of whatever runs there.

A version is verified (digest, names, shapes, dtypes) before the engine is touched, and proved after by the probe
score that the trainer wrote into its manifest. After a failed check or a failed probe the old version serves on; if
it cannot be loaded back either, the worker ends.
"""

from __future__ import annotations

import asyncio
import time

from pipeline.config.types import Config
from pipeline.errors import TornWeights, WeightsError
from pipeline.lifecycle import Role
from pipeline.logs import get_logger
from pipeline.weights import WeightsRegistry, verify
from workers.generation.contracts import Backend
from workers.probe import probe_of


class WeightsWatch:
    """Compares the registry with the engine."""

    def __init__(self, role: Role, backend: Backend) -> None:
        self._registry = WeightsRegistry(role.client, role.keys)
        self._backend = backend
        self._config: Config = role.config
        self._refused: int | None = None
        self._latest: int | None = None

    def saw(self, latest: int | None) -> None:
        """The registry's newest version, as the last claim told it."""
        self._latest = latest

    def newer(self) -> int | None:
        """A version number that the engine should move to, or None."""
        latest = self._latest
        if latest is None or latest == self._refused or latest <= self._backend.version:
            return None
        return latest

    async def pull(self, version: int) -> bool:
        """Load a version; False if it was refused and the old one serves on. Raises TornWeights if neither serves."""
        manifest = await self._registry.get(version)
        if manifest is None:
            return False  # retired meanwhile: a newer one is there
        probe = probe_of(manifest, self._backend.facts.dtype, self._config.weights.probe_tolerance)
        try:
            directory = await asyncio.to_thread(verify, manifest)
            await self._backend.load_weights(directory, version, probe)
        except TornWeights:
            raise  # the process ends; its successor loads a whole version
        except WeightsError as error:
            self._refused = version
            get_logger().error("new weights refused; the old version serves on", version=version, error=str(error))
            return False
        behind_s = round(time.time() - manifest.published_at, 3) if manifest.published_at else None
        get_logger().info("weights loaded", version=version, behind_s=behind_s)
        return True
