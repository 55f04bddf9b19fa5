"""Pulls new weight versions into a worker's engine, between sequences.

A version is verified (digest, names, shapes, dtypes) before the engine is touched, and proved after by the probe
score that the trainer wrote into its manifest. A failed check before the load leaves the old version serving;
a failed probe after it stops the worker.
"""

from __future__ import annotations

import asyncio

from pipeline.config.types import Config
from pipeline.errors import EngineError, TornWeights, WeightsError
from pipeline.lifecycle import Role
from pipeline.logs import get_logger
from pipeline.messages import WeightVersion
from pipeline.weights import WeightsRegistry, verify
from workers.generation.contracts import Backend

_HALF_PRECISION = 10  # bf16 rounds at 2^-8: the demo model's probe differs by up to 0.17 nats from fp32


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
        """Load a version; False if it was refused before the engine was touched."""
        manifest = await self._registry.get(version)
        if manifest is None:
            return False  # retired meanwhile: a newer one is there
        try:
            directory = await asyncio.to_thread(verify, manifest)
            await self._backend.load_weights(directory, version)
        except TornWeights:
            raise  # the process ends; its successor loads a whole version
        except WeightsError as error:
            self._refused = version
            get_logger().error("new weights refused; the old version serves on", version=version, error=str(error))
            return False
        await self._prove(manifest)
        get_logger().info("weights loaded", version=version)
        return True

    async def _prove(self, manifest: WeightVersion) -> None:
        if manifest.probe_score is None:
            return
        score = await self._backend.score(list(manifest.probe_token_ids))
        precision = 1 if self._backend.facts.dtype == "float32" else _HALF_PRECISION
        tolerance = self._config.weights.probe_tolerance * precision * max(1, len(manifest.probe_token_ids))
        if not abs(score - manifest.probe_score) <= tolerance:
            raise EngineError(
                f"weights v{manifest.version}: probe scores {score:.4f}, the trainer measured "
                f"{manifest.probe_score:.4f}; this worker stops rather than serve wrong weights"
            )
