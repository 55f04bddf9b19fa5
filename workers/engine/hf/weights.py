"""Loads new weights into a model in use, or the old ones back, with transformers' own conversions.

check files ─▶ score the probe (old weights) ─▶ copy ─▶ score the probe ─▶ new version
     │                                             └─ fails ─▶ copy the old ones ─▶ score the probe ─▶ old version
     └─ fails: nothing was touched                                                        └─ fails: torn

File headers are checked before the first byte is copied; float tensors are cast to the model's dtype.

With room for a second module the new weights go there while the first one decodes, so there is nothing to restore:

check files ─▶ copy ─▶ score the probe ─▶ (standby: prefill) ─▶ exchange the modules between two tokens
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from sluice.pipeline.errors import RequestError, TornWeights, WeightsError
from sluice.pipeline.weights.adapter import Adapter
from sluice.workers.engine.contracts import WeightsProbe
from sluice.workers.engine.hf.model import LoadedModel
from sluice.workers.engine.hf.passes import summed_logprob
from sluice.workers.engine.hf.standby import second_model
from sluice.workers.engine.weight_files import Layout, LoadedAdapter, equal, has_nan, open_weights, words


class Weights:
    """Tracks which directory the model's weights come from, and holds the second copy, if there is one."""

    def __init__(self, model: LoadedModel, directory: Path, second_copy_gb: float | None = 0.0) -> None:
        """`second_copy_gb`: see `second_model`."""
        self.model, self._directory, self._limit_gb = model, directory, second_copy_gb
        self._base = directory  # of versions that are adapters
        self._spare: LoadedModel | None = None
        self._scored: tuple[tuple[int, ...], float] | None = None  # tokens of a probe and their score, as they are now
        self._prepared: float | None = None  # score of the second module
        self.torn: TornWeights | None = None  # why they are neither the old nor the new ones

    def load(self, directory: Path, probe: WeightsProbe | None) -> None:
        """Load them in place. Raises WeightsError if the old weights are there, TornWeights if neither are."""
        before = self.before(probe)
        self._scored = None
        try:
            self._copy(directory)
            after = self._proved(self.model, directory, probe, before)
        except TornWeights as error:
            self._restore(error, probe, before)
            raise WeightsError(f"{error}; the weights of {self._directory} were restored") from error
        self._is_now(directory, probe, after)

    def has_second(self) -> bool:
        """Whether there is a second module; the first call makes it."""
        if self._spare is None and self._limit_gb != 0:
            self._spare = second_model(self.model, self._limit_gb)
            if self._spare is None:
                self._limit_gb = 0.0
        return self._spare is not None

    def prepare(self, directory: Path, probe: WeightsProbe | None, before: float | None) -> LoadedModel:
        """The second module with these weights, proved; from any thread. Raises WeightsError; nothing else changes."""
        assert self._spare is not None
        try:
            load_weights(self._spare.module, directory, base=self._base)
            self._prepared = self._proved(self._spare, directory, probe, before)
        except TornWeights as error:
            raise WeightsError(f"{error}; the weights of {self._directory} serve on") from error
        return self._spare

    def exchange(self, directory: Path, probe: WeightsProbe | None) -> None:
        """What was prepared is in use now."""
        assert self._spare is not None
        self.model, self._spare = self._spare, self.model
        self._is_now(directory, probe, self._prepared)

    def before(self, probe: WeightsProbe | None) -> float | None:
        """The probe's score under the weights in use. Raises WeightsError."""
        if probe is None or self.torn is not None:
            return None
        if self._scored is not None and self._scored[0] == probe.token_ids:
            return self._scored[1]
        try:
            return summed_logprob(self.model, probe.token_ids)
        except RequestError as error:
            raise WeightsError(f"this engine cannot score the probe of the new weights: {error}") from error

    def _is_now(self, directory: Path, probe: WeightsProbe | None, score: float | None) -> None:
        self._directory, self.torn = directory, None
        self._scored = None if probe is None or score is None else (probe.token_ids, score)

    def _copy(self, directory: Path) -> None:
        changed, features = True, self.model.features
        try:
            watched = frozenset() if features is None else features.names
            changed = load_weights(self.model.module, directory, watched, base=self._base)
        finally:
            if changed and features is not None:
                features.forget()

    def _proved(
        self, model: LoadedModel, directory: Path, probe: WeightsProbe | None, before: float | None
    ) -> float | None:
        """The probe's score under the new weights. Raises TornWeights if it isn't what was measured."""
        if probe is None:
            return None
        score = summed_logprob(model, probe.token_ids)
        if refusal := probe.refusal(directory, before, score):
            raise TornWeights(refusal)
        return score

    def _restore(self, cause: TornWeights, probe: WeightsProbe | None, before: float | None) -> None:
        if self.torn is not None:
            raise cause
        try:
            self._copy(self._directory)
        except WeightsError as error:
            self.torn = TornWeights(f"{cause}; the old weights cannot be restored either: {error}")
            raise self.torn from error
        if probe is not None and before is not None:
            score = summed_logprob(self.model, probe.token_ids)
            if not abs(score - before) <= probe.tolerance:
                self.torn = TornWeights(
                    f"{cause}; after restoring, {self._directory} scores {score:.4f}, not {before:.4f}"
                )
                raise self.torn


_BLOCK = 1 << 18  # of 8 bytes


def _filled(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Copy, and whether it is there; NaN never is."""
    own, given = words(target), words(value)
    on_cpu = target.device.type == value.device.type == "cpu"
    if target.dtype != value.dtype or own is None or given is None or not on_cpu:
        target.copy_(value)
        return equal(target, value.to(target))
    own, given = own.numpy(), given.numpy()
    for at in range(0, len(own), _BLOCK):  # compared while it is in the core's cache; other cores decode meanwhile
        here = slice(at, at + _BLOCK)
        np.copyto(own[here], given[here])
        if not np.array_equal(own[here], given[here]):
            return False
    return not has_nan(target)


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
                    changed = changed or (name in watched and not equal(target, value.to(target)))
                    if not _filled(target, value):
                        raise TornWeights(f"{directory}: {name} does not match what was copied; load a version again")
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise TornWeights(
                f"{directory}: copying the weights failed halfway: {error}; load a version again"
            ) from error
    return changed
