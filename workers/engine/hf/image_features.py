"""What the vision tower makes of the images of running prompts: computed once per weight version.

- Rows that share their `VisionInputs` share the features, through every prefill: at the start, and after new weights.
- New weights drop the features only if a tensor of the vision part changed; a frozen tower is never asked again.
- Features live as long as the inputs they belong to, which the rows hold.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from numpy.typing import NDArray

from sluice.pipeline.images.processor import VisionInputs


class ImageFeatures:
    """Of one loaded model; used from one thread, the one that decodes.

    `computed` counts the runs of the vision tower, `reused` the prefills that needed none.
    """

    def __init__(self, module: Any) -> None:
        """`module` is the whole transformers model. Where it takes no precomputed features, nothing is kept."""
        self._module = module
        base = getattr(module, module.base_model_prefix, module)
        takes = inspect.signature(module.forward).parameters
        self._compute: Any = getattr(base, "get_image_features", None) if "mm_encoder_outputs" in takes else None
        self._known = inspect.signature(self._compute).parameters if self._compute is not None else {}
        self._made: WeakKeyDictionary[VisionInputs, Any] = WeakKeyDictionary()
        self.names = _vision_tensors(module)
        self.computed = 0
        self.reused = 0

    def arguments(self, vision: VisionInputs) -> dict[str, Any]:
        """The images as arguments of the model's forward pass."""
        if self._compute is None:
            self.computed += 1
            return self._placed(vision)
        made = self._made.get(vision)
        if made is None:
            given = {name: value for name, value in self._placed(vision).items() if name in self._known}
            made = self._made[vision] = self._compute(**given, return_dict=True)
            self.computed += 1
        else:
            self.reused += 1
        return {"mm_encoder_outputs": {"image": made}}

    def forget(self) -> None:
        """The vision part has new weights."""
        self._made.clear()

    def _placed(self, vision: VisionInputs) -> dict[str, torch.Tensor]:
        """The processor's arrays on the model's device; floats in its dtype."""
        return {name: _placed(array, self._module) for name, array in vision.tensors.items()}


def _placed(array: NDArray[Any], module: Any) -> torch.Tensor:
    value = torch.from_numpy(array)
    return value.to(module.device, module.dtype) if value.is_floating_point() else value.to(module.device)


def _vision_tensors(module: Any) -> frozenset[str]:
    """Names of the model's tensors that don't belong to the language model or its head."""
    text = [part for part in (module.get_decoder(), module.get_output_embeddings()) if part is not None]
    of_text = {id(tensor) for part in text for tensor in (*part.parameters(), *part.buffers())}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return frozenset(name for name, tensor in tensors if id(tensor) not in of_text)
