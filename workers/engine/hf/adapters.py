"""LoRA adapters beside the module's weights: each row of a batch under its own, or under none.

    files ─▶ fit the model? ─▶ hooks on the layers ─▶ proof ─▶ rows
    output[rows of an adapter] += (input · Aᵀ) · (scale · B)ᵀ

- torch's forward hooks do it; a layer that no loaded adapter changes has none, so without adapters nothing is slower.
- The first axis of a layer's input must be the rows. The proof finds layers for which it isn't (experts get the tokens
  that were chosen for them), and layers whose weights the model uses without calling them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.images.features import vision_tensors
from sluice.pipeline.weights.adapter import Adapter
from sluice.workers.engine.weight_files import LoadedAdapter

_TOKENS = 8  # of each row of the proof
_EXACT, _ROUNDED = 1e-4, 2e-2  # largest difference from the merged layer's output ÷ its largest value: fp32, others


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """A loaded adapter: per layer A (rank, in) and scaled B (out, rank), on the layer's device in its dtype."""

    factors: dict[str, tuple[Tensor, Tensor]]


@dataclass(slots=True)
class _Proof:
    """Of the first of two rows, which has the adapter; the second has none."""

    merged: Callable[[str, Tensor], Tensor]  # name and weight of a layer -> its weight with the adapter, float32
    off: dict[str, float] = field(default_factory=dict)  # layer -> difference ÷ largest value; inf: rows aren't apart


class Adapters:
    """The adapters of one module; used from one thread."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._loaded: list[Lora] = []
        self._hooks: dict[str, Any] = {}
        self._groups: list[tuple[Lora, Tensor | None]] = []  # of the pass that runs; None: all its rows
        self._proof: _Proof | None = None

    @contextmanager
    def rows(self, loras: Sequence[Lora | None]) -> Iterator[None]:
        """Passes in this block have these rows."""
        if self._hooks:
            self._groups = list(_grouped(loras, self._module.device))
        try:
            yield
        finally:
            self._groups = []

    def load(self, found: Adapter) -> Lora:
        """Load and prove an adapter. Raises WeightsError; all others serve as before."""
        lora = Lora({})
        with ExitStack() as stack:
            opened = LoadedAdapter(found.directory, found, stack)
            opened.check(self._module.state_dict(keep_vars=True))
            self._check_text(found)
            for name in found.shapes:
                weight = self._linear(found, name).weight
                down, up = (part.to(weight) for part in opened.factors(name))
                lora.factors[name] = down, up
            self._loaded.append(lora)
            self._hook()
            try:
                self._prove(found, lora, _Proof(lambda name, weight: opened.merged(f"{name}.weight", weight)))
            except BaseException:
                self.drop(lora)
                raise
        return lora

    def drop(self, lora: Lora | None) -> None:
        """Forget an adapter that no row has."""
        if lora is not None:
            self._loaded.remove(lora)
            self._hook()

    def _hook(self) -> None:
        """A hook on each layer that a loaded adapter changes, and on no other."""
        wanted = {name for lora in self._loaded for name in lora.factors}
        for name in self._hooks.keys() - wanted:
            self._hooks.pop(name).remove()
        for name in wanted - self._hooks.keys():
            self._hooks[name] = self._module.get_submodule(name).register_forward_hook(self._adding(name))

    def _adding(self, name: str) -> Callable[[Any, tuple[Any, ...], Tensor], Tensor]:
        def add(layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
            inputs, added = args[0], output
            for lora, rows in self._groups:
                if (factors := lora.factors.get(name)) is None:
                    continue
                down, up = factors
                if rows is None:
                    added = added + linear(linear(inputs, down), up)
                else:
                    added = added.index_add(0, rows, linear(linear(inputs[rows], down), up))
            if self._proof is not None:
                self._proof.off[name] = _off(layer, inputs, added, self._proof.merged(name, layer.weight))
            return added

        return add

    def _linear(self, found: Adapter, name: str) -> Any:
        layer = self._module.get_submodule(name)
        if not isinstance(layer, torch.nn.Linear):
            raise WeightsError(
                f"{found.directory}: {name} is a {type(layer).__name__}, and only torch.nn.Linear layers take adapters"
            )
        return layer

    def _check_text(self, found: Adapter) -> None:
        if getattr(self._module.config, "vision_config", None) is None:
            return
        vision = vision_tensors(self._module)
        if seen := next((name for name in found.shapes if f"{name}.weight" in vision), None):
            raise WeightsError(
                f"{found.directory}: {seen} is of the vision part, whose features all rows share; leave it out of "
                "trainer.lora.target_modules (trainer.freeze_vision), or set worker.lora: merged"
            )

    def _prove(self, found: Adapter, lora: Lora, proof: _Proof) -> None:
        """One pass over two rows, each layer against one that has the adapter merged into its weight."""
        vocab = self._module.get_input_embeddings().num_embeddings
        tokens = torch.arange(1, _TOKENS + 1, device=self._module.device).remainder(vocab).expand(2, -1)
        self._proof = proof
        try:
            with self.rows([lora, None]):
                self._module(input_ids=tokens, use_cache=False)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise WeightsError(f"{found.directory}: a pass with this adapter fails: {error}") from error
        finally:
            self._proof = None
        if unused := next((name for name in found.shapes if name not in proof.off), None):
            raise WeightsError(
                f"{found.directory}: the model doesn't call {unused} with its own input, so an adapter beside it would "
                "have no effect; set worker.lora: merged"
            )
        limit = _EXACT if self._module.dtype == torch.float32 else _ROUNDED
        name, off = max(proof.off.items(), key=lambda item: item[1])
        if off == float("inf"):
            raise WeightsError(
                f"{found.directory}: {name} gets its input in another form than one row for each sequence (as experts "
                "do), so rows can't have different adapters there; set worker.lora: merged"
            )
        if not off <= limit:
            raise WeightsError(
                f"{found.directory}: {name} with the adapter beside it differs by {off:.1e} from the merged layer "
                f"(tolerance {limit:.0e}); are its values finite? Set worker.lora: merged"
            )


def _grouped(loras: Sequence[Lora | None], device: torch.device) -> Iterator[tuple[Lora, Tensor | None]]:
    places: dict[int, list[int]] = {}
    for place, lora in enumerate(loras):
        places.setdefault(id(lora), []).append(place)
    for its in places.values():
        if (lora := loras[its[0]]) is not None:
            yield lora, None if len(its) == len(loras) else torch.tensor(its, device=device)


def _off(layer: Any, inputs: Tensor, output: Tensor, merged: Tensor) -> float:
    """Of two rows, the first with the adapter, against layers in float32; inf if they aren't the two rows."""
    if inputs.ndim != 3 or len(inputs) != 2:
        return float("inf")
    bias = None if layer.bias is None else layer.bias.float()
    wanted = torch.stack(
        [linear(inputs[0].float(), merged, bias), linear(inputs[1].float(), layer.weight.float(), bias)]
    )
    return float((output.float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
