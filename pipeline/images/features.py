"""What a vision tower makes of images: each image once, while the tower's weights stay the same.

    VisionInputs of a pass ─▶ each of their images ─┬─ kept ────────────┬─▶ joined ─▶ arguments of the forward pass
                                                    └─ the tower, alone ┘

- transformers' models compute features with `get_image_features` and take them back as `mm_encoder_outputs`. A model
  that doesn't gets the pixels at every pass, and so does one whose start-up proof fails with features (`give_up`).
- The features are kept in host memory: those of living `VisionInputs`, and `max_bytes` more, least recently used first
  out. An image without a digest is kept with its inputs only.
- They belong to one set of weights: whoever changes the vision part calls `forget`.
- This module imports no torch: its callers pass the module.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from numpy.typing import NDArray

from sluice.pipeline.images.processor import ProcessedImage, VisionInputs, joined_tensors
from sluice.pipeline.logs import get_logger

_POOLED, _DEEPSTACK = "pooler_output", "deepstack_features"
_UNREAD = frozenset({"last_hidden_state", "hidden_states", "attentions"})  # by forward passes that take the others


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Features:
    """Of one image, on the host: a tensor, or a list of tensors, as its model has it."""

    pooled: Any
    layers: list[Any] | None  # the same of each layer; None: this model has no deepstack

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.pooled) + _num_bytes(self.layers or [])


class ImageFeatures:
    """Of one loaded model; one thread at a time.

    `computed` counts the images that went through the vision tower, `reused` those of a pass that didn't have to.
    """

    def __init__(self, module: Any, torch: Any, *, max_bytes: int = 0) -> None:
        """`module` is the whole transformers model, `torch` that module."""
        self._module, self._torch, self._max_bytes = module, torch, max_bytes
        base = getattr(module, module.base_model_prefix, module)
        self.names = vision_tensors(module)
        takes = inspect.signature(module.forward).parameters
        self._compute: Any = getattr(base, "get_image_features", None) if "mm_encoder_outputs" in takes else None
        self._known = _arguments(self._compute)
        self._of_positions = _arguments(getattr(base, "get_rope_index", None))
        self._pinned: WeakKeyDictionary[VisionInputs, list[_Features]] = WeakKeyDictionary()
        self._living: WeakValueDictionary[str | ProcessedImage, _Features] = WeakValueDictionary()
        self._kept: OrderedDict[str, _Features] = OrderedDict()
        self.num_bytes = 0  # of what is kept beyond living inputs
        self.computed = 0
        self.reused = 0

    @property
    def reuses(self) -> bool:
        """Whether the model takes features; else its vision tower runs in every pass."""
        return self._compute is not None

    def arguments(self, inputs: Sequence[VisionInputs]) -> dict[str, Any]:
        """The images of a pass, in order, as arguments of the model's forward pass."""
        found = [one for each in inputs for one in self._of(each)]
        if self._compute is None:
            return self.pixels(inputs)
        made = SimpleNamespace(pooler_output=self._joined([one.pooled for one in found]))
        if found[0].layers is not None:
            layers = zip(*(one.layers or [] for one in found), strict=True)
            made.deepstack_features = [self._joined(layer) for layer in layers]
        grids = joined_tensors(inputs, self._of_positions)
        placed_grids = {name: placed(array, self._module, self._torch) for name, array in grids.items()}
        return {"mm_encoder_outputs": {"image": made}, **placed_grids}

    def pixels(self, inputs: Sequence[VisionInputs]) -> dict[str, Any]:
        """The same for a pass that runs the vision tower itself."""
        self.computed += sum(len(each.images) for each in inputs)
        tensors = inputs[0].tensors if len(inputs) == 1 else joined_tensors(inputs)
        return {name: placed(array, self._module, self._torch) for name, array in tensors.items()}

    def forget(self) -> None:
        """The vision part has new weights."""
        self._pinned.clear()
        self._living.clear()
        self._kept.clear()
        self.num_bytes = 0

    def give_up(self, why: str) -> None:
        """Run the vision tower in every pass from now on."""
        get_logger().warning("the vision tower runs in every pass", model=type(self._module).__name__, cause=why)
        self._compute = None
        self.forget()

    def _of(self, inputs: VisionInputs) -> Sequence[_Features]:
        """The features of its images, in order; none once the model has turned out to take none."""
        pinned = self._pinned.get(inputs)
        if pinned is not None:
            self.reused += len(pinned)
            return pinned
        made: list[_Features] = []
        for image in inputs.images:
            one = self._one(image)
            if one is None:
                return ()
            made.append(one)
        self._pinned[inputs] = made
        return made

    def _one(self, image: ProcessedImage) -> _Features | None:
        key = image.digest or image
        found = self._living.get(key)
        if found is not None:
            self.reused += 1
        elif (found := self._computed(image)) is not None:
            self._living[key] = found
        if found is not None and image.digest is not None:
            self._keep(image.digest, found)
        return found

    def _computed(self, image: ProcessedImage) -> _Features | None:
        if self._compute is None:
            return None
        given = {name: array for name, array in image.tensors.items() if name in self._known}
        with self._torch.no_grad():
            made: Any = self._compute(
                **{name: placed(array, self._module, self._torch) for name, array in given.items()}, return_dict=True
            )
        self.computed += 1
        if odd := set(made.keys()) - _UNREAD - {_POOLED, _DEEPSTACK}:
            self.give_up(f"its features of an image have parts unknown here: {', '.join(sorted(odd))}")
            return None
        return _Features(_hosted(made.pooler_output), _hosted(getattr(made, _DEEPSTACK, None)))

    def _keep(self, digest: str, made: _Features) -> None:
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return
        if made.num_bytes > self._max_bytes:
            return
        self._kept[digest] = made
        self.num_bytes += made.num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def _joined(self, parts: Sequence[Any]) -> Any:
        """Of several images, on the model's device."""
        device = self._module.device
        if isinstance(parts[0], list):
            return [tensor.to(device) for part in parts for tensor in part]
        return self._torch.cat(list(parts)).to(device)


def placed(array: NDArray[Any], module: Any, torch: Any) -> Any:
    """A processor's array as a tensor on the model's device; floats in its dtype."""
    value = torch.from_numpy(array if array.flags.writeable else array.copy()).to(module.device)
    return value.to(module.dtype) if value.is_floating_point() else value


def vision_tensors(module: Any) -> frozenset[str]:
    """Names of the model's tensors that don't belong to the language model or its head."""
    text = [part for part in (module.get_decoder(), module.get_output_embeddings()) if part is not None]
    of_text = {id(tensor) for part in text for tensor in (*part.parameters(), *part.buffers())}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return frozenset(name for name, tensor in tensors if id(tensor) not in of_text)


def _arguments(function: Any) -> frozenset[str]:
    """Their names; none of None."""
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)


def _hosted(value: Any) -> Any:
    """Tensors, and lists of them, in host memory."""
    if isinstance(value, list | tuple):
        return [_hosted(one) for one in cast("Sequence[Any]", value)]
    return None if value is None else value.detach().cpu()


def _num_bytes(value: Any) -> int:
    return sum(map(_num_bytes, cast("list[Any]", value))) if isinstance(value, list) else value.nbytes
