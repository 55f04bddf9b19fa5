"""New weights into a model that is in use, or the old ones back.

check files ─▶ score the probe (old weights) ─▶ copy ─▶ score the probe ─▶ new version
     │                                             └─ fails ─▶ copy the old ones ─▶ score the probe ─▶ old version
     └─ fails: nothing was touched                                                        └─ fails: torn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pipeline.errors import RequestError, TornWeights, WeightsError
from workers.generation.backends.hf.weights import load_weights
from workers.generation.contracts import WeightsProbe


class Weights:
    """Which directory the module's weights are from; `score` is the module's own."""

    def __init__(self, module: torch.nn.Module, directory: Path, score: Callable[[Sequence[int]], float]) -> None:
        self._module, self._directory, self._score = module, directory, score
        self.torn: TornWeights | None = None  # why they are neither the old ones nor the new

    def load(self, directory: Path, probe: WeightsProbe | None) -> None:
        """Raises WeightsError with the old weights in place, TornWeights with neither."""
        before = None if probe is None or self.torn else self._before(probe)
        try:
            load_weights(self._module, directory)
            self._prove(directory, probe, before)
        except TornWeights as error:
            self._restore(error, probe, before)
            raise WeightsError(f"{error}; the weights of {self._directory} were loaded back") from error
        self._directory, self.torn = directory, None

    def _before(self, probe: WeightsProbe) -> float:
        try:
            return self._score(probe.token_ids)
        except RequestError as error:
            raise WeightsError(f"this engine cannot score the probe of the new weights: {error}") from error

    def _prove(self, directory: Path, probe: WeightsProbe | None, before: float | None) -> None:
        if probe and (refusal := probe.refusal(directory, before, self._score(probe.token_ids))):
            raise TornWeights(refusal)

    def _restore(self, cause: TornWeights, probe: WeightsProbe | None, before: float | None) -> None:
        if self.torn is not None:
            raise cause
        try:
            load_weights(self._module, self._directory)
        except WeightsError as error:
            self.torn = TornWeights(f"{cause}; the old weights cannot be loaded back either: {error}")
            raise self.torn from error
        if probe is not None and before is not None:
            score = self._score(probe.token_ids)
            if not abs(score - before) <= probe.tolerance:
                self.torn = TornWeights(f"{cause}; loaded back, {self._directory} scores {score:.4f}, not {before:.4f}")
                raise self.torn
