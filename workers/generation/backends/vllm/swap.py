"""New weights into a running core, or the old ones back. Its caller holds the pause.

score the probe (old weights) ─▶ load ─▶ reset caches ─▶ score the probe ─▶ new version
                                   └─ fails ─▶ the same with the old ones ─▶ old version, or torn
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipeline.errors import EngineError, TornWeights, WeightsError
from workers.generation.backends.vllm.sequences import Sequences
from workers.generation.backends.vllm.starting import StartedEngine
from workers.generation.contracts import WeightsProbe


class CoreWeights:
    """Which directory the core's weights are from."""

    def __init__(self, engine: StartedEngine, directory: Path, sequences: Sequences) -> None:
        self._engine, self._directory, self._sequences = engine, directory, sequences
        self._whole = True

    async def checked(self, directory: Path) -> dict[str, str]:
        """Name in the files -> the name for vLLM. Raises WeightsError for files that do not fill the model exactly."""
        return await asyncio.to_thread(self._engine.checkpoint.names_for, directory)

    async def load(self, directory: Path, names: dict[str, str], probe: WeightsProbe | None) -> None:
        """Raises WeightsError with the old weights in place, TornWeights with neither."""
        score, whole = self._sequences.score_in_pause, self._whole
        before = await score(probe.token_ids) if probe and whole else None
        self._whole = False
        try:
            await self._copy(directory, names)
            if probe and not probe.accepts(found := await score(probe.token_ids)):
                raise TornWeights(probe.refusal(directory, found))
        except TornWeights as error:
            if not whole:
                raise
            await self._restore(error, probe, before)
            raise WeightsError(f"{error}; the weights of {self._directory} were loaded back") from error
        self._directory, self._whole = directory, True

    async def _restore(self, cause: TornWeights, probe: WeightsProbe | None, before: float | None) -> None:
        try:
            await self._copy(self._directory, await self.checked(self._directory))
        except WeightsError as error:
            raise TornWeights(f"{cause}; the old weights cannot be loaded back either: {error}") from error
        if probe is not None and before is not None:
            score = await self._sequences.score_in_pause(probe.token_ids)
            if not abs(score - before) <= probe.tolerance:
                raise TornWeights(f"{cause}; loaded back, {self._directory} scores {score:.4f}, not {before:.4f}")
        self._whole = True

    async def _copy(self, directory: Path, names: dict[str, str]) -> None:
        llm, or_dead = self._engine.llm, self._sequences.or_dead
        try:
            await or_dead(llm.collective_rpc("sluice_load_weights", args=(str(directory), names)))
            # What was computed with other weights must not be read.
            await or_dead(llm.reset_prefix_cache())
            await or_dead(llm.reset_encoder_cache())
        except Exception as error:  # vLLM hands on a worker's error as a bare Exception
            if isinstance(error, EngineError):
                raise
            raise TornWeights(f"{directory}: loading the weights failed halfway: {error}") from error
