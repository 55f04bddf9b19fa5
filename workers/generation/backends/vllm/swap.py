"""New weights into a running core, or the old ones back. Its caller holds the pause.

score the probe (old weights) ─▶ load ─▶ reset caches ─▶ score the probe ─▶ new version
                                   └─ fails ─▶ the same with the old ones ─▶ old version, or torn
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipeline.errors import EngineError, RequestError, TornWeights, WeightsError
from workers.generation.backends.vllm.sequences import Sequences
from workers.generation.backends.vllm.starting import StartedEngine
from workers.generation.contracts import WeightsProbe


class CoreWeights:
    """Which directory the core's weights are from."""

    def __init__(self, engine: StartedEngine, directory: Path, sequences: Sequences) -> None:
        self._engine, self._directory, self._sequences = engine, directory, sequences

    async def checked(self, directory: Path) -> dict[str, str]:
        """Name in the files -> the name for vLLM. Raises WeightsError for files that do not fill the model exactly."""
        return await asyncio.to_thread(self._engine.checkpoint.names_for, directory)

    async def load(self, directory: Path, names: dict[str, str], probe: WeightsProbe | None) -> None:
        """Raises WeightsError with the old weights in place, TornWeights with neither."""
        score, whole = self._sequences.score_in_pause, self._sequences.torn is None
        before = await self._before(probe) if whole else None
        self._sequences.torn = TornWeights(f"loading {directory} was broken off; load a version again")
        try:
            await self._copy(directory, names)
            if probe and (refusal := probe.refusal(directory, before, await score(probe.token_ids))):
                raise TornWeights(refusal)
        except TornWeights as error:
            await self._restore(error, probe, before, whole=whole)
            raise WeightsError(f"{error}; the weights of {self._directory} were loaded back") from error
        self._directory, self._sequences.torn = directory, None

    async def _before(self, probe: WeightsProbe | None) -> float | None:
        try:
            return None if probe is None else await self._sequences.score_in_pause(probe.token_ids)
        except RequestError as error:
            raise WeightsError(f"this engine cannot score the probe of the new weights: {error}") from error

    async def _restore(
        self, cause: TornWeights, probe: WeightsProbe | None, before: float | None, *, whole: bool
    ) -> None:
        torn: TornWeights | None = None if whole else cause
        try:
            if whole:
                await self._copy(self._directory, await self.checked(self._directory))
        except WeightsError as error:
            torn = TornWeights(f"{cause}; the old weights cannot be loaded back either: {error}")
        if torn is None and probe is not None and before is not None:
            score = await self._sequences.score_in_pause(probe.token_ids)
            if not abs(score - before) <= probe.tolerance:
                torn = TornWeights(f"{cause}; loaded back, {self._directory} scores {score:.4f}, not {before:.4f}")
        self._sequences.torn = torn
        if torn is not None:
            raise torn

    async def _copy(self, directory: Path, names: dict[str, str]) -> None:
        llm, or_dead = self._engine.llm, self._sequences.or_dead
        try:
            await or_dead(llm.collective_rpc("sluice_load_weights", args=(str(directory), names)))
            # What was computed with other weights must not be read.
            forgotten = await or_dead(llm.reset_prefix_cache(reset_connector=True))
            await or_dead(llm.reset_encoder_cache())
        except Exception as error:  # vLLM hands on a worker's error as a bare Exception
            if isinstance(error, EngineError):
                raise
            raise TornWeights(f"{directory}: loading the weights failed halfway: {error}") from error
        if not forgotten:
            raise TornWeights(f"{directory}: vLLM keeps cache that was computed with other weights")
