"""A directory of safetensors -> the running model, in place.

Everything is checked from the file headers before the first byte is copied; float tensors are cast to the model's.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError

from pipeline.errors import TornWeights
from workers.generation.weight_files import check_weights, module_targets, open_weights


def load_weights(module: torch.nn.Module, directory: Path) -> None:
    """Copy the directory's tensors into the module.

    Raises WeightsError with the module untouched, or TornWeights once a byte may have been copied.
    """
    with ExitStack() as stack:
        sources = open_weights(directory, stack)
        targets = module_targets(module, sources)
        check_weights(directory, sources, targets)
        try:
            for name, file in sources.items():
                targets[name].copy_(file.get_tensor(name))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise TornWeights(
                f"{directory}: copying the weights failed halfway: {error}; load a version again"
            ) from error
