"""A directory of safetensors -> the running model, in place, through transformers' own conversions.

Everything is checked from the file headers before the first byte is copied; float tensors are cast to the model's.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError

from pipeline.errors import TornWeights
from workers.generation.weight_files import Layout, open_weights


def load_weights(module: torch.nn.Module, directory: Path) -> None:
    """Copy the directory's tensors into the module, and look at each that it arrived.

    Raises WeightsError with the module untouched, or TornWeights once a byte may have been copied.
    """
    with ExitStack() as stack:
        sources = open_weights(directory, stack)
        layout = Layout(module)
        pieces = layout.check(directory, sources)
        try:
            for piece in pieces:
                for name, value in piece.tensors(module, lambda source: sources[source].get_tensor(source)).items():
                    target = layout.own[name]
                    target.copy_(value)
                    if not torch.equal(target, value.to(target)):  # NaN is refused
                        raise TornWeights(f"{directory}: {name} is not what was copied into it; load a version again")
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise TornWeights(
                f"{directory}: copying the weights failed halfway: {error}; load a version again"
            ) from error
