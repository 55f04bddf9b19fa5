"""What this model's files must hold: vLLM itself starts, and serves, even if linear weights are missing."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import ModelError, WeightsError
from sluice.pipeline.images.features import vision_tensors
from sluice.pipeline.weights.adapter import Adapter
from sluice.workers.engine.weight_files import Layout, LoadedAdapter, Piece, open_weights, tied
from sluice.workers.model_files import has_vision


class Checkpoint:
    """Names, shapes and ties of one model, from its configuration as transformers builds it (without memory)."""

    def __init__(self, model: ModelConfig) -> None:
        """Raises ModelError for a directory whose safetensors don't fill the whole model."""
        self._layout, self._vision, self._unknown = _layout(model)
        self._one_name: dict[str, str] = {}  # tensor of the model -> the first of its names
        self._start: dict[str, Piece] = {}  # tensor of the model -> the piece vLLM was started with
        directory = Path(model.path)
        if self._layout is None:
            return
        self._one_name = {name: names[0] for names in tied(self._layout.own) for name in names}
        if not any(directory.glob("*.safetensors")):
            return
        try:
            with ExitStack() as stack:
                sources = open_weights(directory, stack)
                pieces, unknown = self._layout.pieces(sources)
                self._start = {self._one_name[piece.target]: piece for piece in reversed(pieces)}
                if not unknown:  # a checkpoint with other names is left to vLLM, which renames them
                    self._check_start(model.path, self._layout.filled(directory, pieces, sources))
        except WeightsError as error:
            raise ModelError(str(error)) from error

    def adaptable(self) -> list[str]:
        """Last parts of the names of the layers that may have an adapter beside them. Raises ModelError."""
        if self._layout is None:
            raise ModelError(f"worker.lora: requests: {self._unknown}; leave it out")
        return self._layout.linear_layers()

    def check_beside(self, found: Adapter, taken: Collection[str]) -> None:
        """Raises WeightsError for an adapter that doesn't fit the model, or one of a layer that isn't in `taken`."""
        directory = found.directory
        if self._layout is None:
            raise WeightsError(f"{directory}: cannot check the adapter against the model: {self._unknown}")
        with ExitStack() as stack:
            LoadedAdapter(directory, found, stack).check(self._layout.own)
        if other := next((name for name in found.shapes if name not in taken), None):
            raise WeightsError(
                f"{directory}: vLLM keeps no adapter beside {other} in this model (the output layer and the vision "
                "part never take one); leave it out of trainer.lora.target_modules, set worker.lora: merged, or use "
                "worker.backend hf"
            )

    def names_for(self, directory: Path) -> dict[str, str]:
        """Name in the directory -> the name by which vLLM must load it; one per tensor.

        Raises WeightsError unless the directory fills the model exactly, in the layout vLLM was started with.
        """
        if self._layout is None:
            raise WeightsError(f"{directory}: cannot check the weights against the model: {self._unknown}")
        with ExitStack() as stack:
            pieces = self._layout.check(directory, open_weights(directory, stack))
        names: dict[str, str] = {}
        done: set[str] = set()
        for piece in pieces:
            tensor = self._one_name[piece.target]
            if tensor in done:
                continue  # the same under another name
            done.add(tensor)
            start = self._start.get(tensor, piece)
            if piece.sources.keys() == start.sources.keys():
                names |= {name: name for name in piece.sources}
            elif piece.converter is None and start.converter is None:
                names[next(iter(piece.sources))] = next(iter(start.sources))
            else:
                raise WeightsError(
                    f"{directory}: {next(iter(piece.sources))} has another layout than {next(iter(start.sources))}, "
                    "with which vLLM was started; publish weights as save_pretrained writes them"
                )
        return names

    def adapted(self, base: Path, directory: Path) -> dict[str, str]:
        """Name in the base's files -> name in transformers' model, of what the adapter of the directory changes.

        Raises WeightsError for an adapter that doesn't belong to this model.
        """
        if (found := Adapter.of(directory)) is None or self._layout is None:
            raise WeightsError(f"{directory}: cannot check the adapter against the model: {self._unknown}")
        with ExitStack() as stack:
            adapter = LoadedAdapter(directory, found, stack)
            adapter.check(self._layout.own)
            names = adapter.sources(self._layout.pieces(open_weights(base, stack))[0])
        if seen := sorted(self._vision & set(names.values())):
            raise WeightsError(f"{directory}: {seen[0]} is of the vision part; use worker.backend hf")
        return names

    def vision_digest(self, directory: Path) -> str:
        """sha256 of the tensors outside the language model and its head, as stored; "" if there are none.

        Reads them all. Raises WeightsError.
        """
        if self._layout is None or not self._vision:
            return ""
        digest = sha256()
        with ExitStack() as stack:
            sources = open_weights(directory, stack)
            for piece in self._layout.pieces(sources)[0]:
                for name in sorted(piece.sources) if piece.target in self._vision else ():
                    tensor: torch.Tensor = sources[name].get_tensor(name)
                    digest.update(f"{piece.target} {name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _check_start(self, path: str, filled: set[str]) -> None:
        for names in tied(self._layout.own if self._layout else {}):
            if filled.isdisjoint(names):
                raise ModelError(f"{path}: the weights are incomplete, e.g. {names[0]}; export them again")


def _layout(model: ModelConfig) -> tuple[Layout | None, frozenset[str], str]:
    """(layout, names of the vision part, ""), or None and why there is none: vLLM knows models transformers doesn't."""
    try:
        config: Any = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        sees = has_vision(msgspec.structs.replace(model, variant="auto"), config)
        kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            module: Any = kind.from_config(config, trust_remote_code=model.trust_remote_code)
        module.tie_weights()
        return Layout(module), vision_tensors(module) if sees else frozenset[str](), ""
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, AttributeError) as error:
        return None, frozenset[str](), f"{type(error).__name__}: {error}"
