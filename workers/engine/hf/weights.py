"""Loads new weights into a model in use, or the old ones back, with transformers' own conversions.

check files ─▶ score the probe (old weights) ─▶ copy ─▶ score the probe ─▶ new version
     │                                             └─ fails ─▶ copy the old ones ─▶ score the probe ─▶ old version
     └─ fails: nothing was touched                                                        └─ fails: torn

File headers are checked before the first byte is copied; float tensors are cast to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError

from sluice.pipeline.errors import RequestError, TornWeights, WeightsError
from sluice.pipeline.images.features import ImageFeatures
from sluice.pipeline.weights.adapter import Adapter
from sluice.workers.engine.contracts import WeightsProbe
from sluice.workers.engine.weight_files import Layout, LoadedAdapter, open_weights


class Weights:
    """Tracks which directory the module's weights come from; `score` is the module's own."""

    def __init__(
        self,
        module: torch.nn.Module,
        directory: Path,
        score: Callable[[Sequence[int]], float],
        features: ImageFeatures | None = None,
    ) -> None:
        """`features` are the model's, if it sees images: they are dropped unless the vision part stays as it is."""
        self._module, self._directory, self._score, self._features = module, directory, score, features
        self._base = directory  # of versions that are adapters
        self.torn: TornWeights | None = None  # why they are neither the old nor the new ones

    def load(self, directory: Path, probe: WeightsProbe | None) -> None:
        """Raises WeightsError if the old weights are in place, TornWeights if neither are."""
        before = None if probe is None or self.torn else self._before(probe)
        try:
            self._copy(directory)
            self._prove(directory, probe, before)
        except TornWeights as error:
            self._restore(error, probe, before)
            raise WeightsError(f"{error}; the weights of {self._directory} were restored") from error
        self._directory, self.torn = directory, None

    def _copy(self, directory: Path) -> None:
        changed = True
        try:
            watched = frozenset() if self._features is None else self._features.names
            changed = load_weights(self._module, directory, watched, base=self._base)
        finally:
            if changed and self._features is not None:
                self._features.forget()

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
            self._copy(self._directory)
        except WeightsError as error:
            self.torn = TornWeights(f"{cause}; the old weights cannot be restored either: {error}")
            raise self.torn from error
        if probe is not None and before is not None:
            score = self._score(probe.token_ids)
            if not abs(score - before) <= probe.tolerance:
                self.torn = TornWeights(
                    f"{cause}; after restoring, {self._directory} scores {score:.4f}, not {before:.4f}"
                )
                raise self.torn


def load_weights(
    module: torch.nn.Module, directory: Path, watched: frozenset[str] = frozenset(), base: Path | None = None
) -> bool:
    """Copy the directory's tensors into the module and verify each one; whether a `watched` one changed.

    `base`: of a directory with an adapter; its tensors are copied, with the adapter merged into them. Raises
    WeightsError with the module untouched, or TornWeights once a byte may have been copied.
    """
    found = Adapter.of(directory)
    if found is not None and base is None:
        raise WeightsError(f"{directory}: an adapter, and nothing says which model it belongs to")
    files = directory if found is None or base is None else base
    with ExitStack() as stack:
        sources = open_weights(files, stack)
        layout = Layout(module)
        pieces, changed = layout.check(files, sources), False
        adapter = None if found is None else LoadedAdapter(directory, found, stack)
        if adapter is not None:
            adapter.check(layout.own)
        try:
            for piece in pieces:
                for name, stored in piece.tensors(module, lambda source: sources[source].get_tensor(source)).items():
                    target = layout.own[name]
                    value = stored if adapter is None else adapter.merged(name, stored)
                    changed = changed or (name in watched and not torch.equal(target, value.to(target)))
                    target.copy_(value)
                    if not torch.equal(target, value.to(target)):  # NaN is refused
                        raise TornWeights(f"{directory}: {name} does not match what was copied; load a version again")
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise TornWeights(
                f"{directory}: copying the weights failed halfway: {error}; load a version again"
            ) from error
    return changed
