"""What the files of this model must hold: vLLM itself starts, and serves, with linear weights that are missing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

from pipeline.config.engine_types import ModelConfig
from pipeline.errors import ModelError, WeightsError
from workers.generation.weight_files import check_weights, module_targets, open_weights, tied


class Checkpoint:
    """The names, shapes and ties of one model, by its configuration as transformers builds it (without memory)."""

    def __init__(self, model: ModelConfig) -> None:
        """Raises ModelError for a directory whose safetensors leave a part of the model unfilled."""
        self._targets, self._unknown = _targets(model)
        self._names: set[str] = set()
        directory = Path(model.path)
        if any(directory.glob("*.safetensors")):
            try:
                with ExitStack() as stack:
                    self._names = set(open_weights(directory, stack))
            except WeightsError as error:
                raise ModelError(str(error)) from error
            self._check_start(model.path)

    def names_for(self, directory: Path) -> dict[str, str]:
        """Name in the directory -> the name by which vLLM is to load it; one for each tensor.

        Raises WeightsError unless the directory fills the model exactly.
        """
        if self._targets is None:
            raise WeightsError(f"{directory}: the weights cannot be checked against the model: {self._unknown}")
        with ExitStack() as stack:
            sources = open_weights(directory, stack)
            check_weights(directory, sources, self._targets)
            names: dict[str, str] = {}
            for group in tied(self._targets):
                given = next(name for name in group if name in sources)
                names[given] = next((name for name in group if name in self._names), given)
            return names

    def _check_start(self, path: str) -> None:
        """A checkpoint with names of its own is left to vLLM, which renames."""
        if self._targets is None or self._names - self._targets.keys():
            return
        for group in tied(self._targets):
            if self._names.isdisjoint(group):
                raise ModelError(f"{path}: the weights do not fill the model, e.g. {group[0]}; export it again")


def _targets(model: ModelConfig) -> tuple[dict[str, torch.Tensor] | None, str]:
    """(tensors on the meta device, "") or (None, why there are none): vLLM knows models that transformers does not."""
    try:
        config: Any = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        sees = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            module: Any = kind.from_config(config, trust_remote_code=model.trust_remote_code)
        module.tie_weights()
        return module_targets(module), ""
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"
