"""Directories of safetensors and the model they must fill, checked from their headers alone.

- Names and shapes on disk are the hub's; transformers stores some layers differently (all experts of a layer in one
  tensor) and converts on load. Its conversions are used here, for both engines.
- Tied parameters are one tensor under several names: one name suffices, and two must agree.
- Float tensors may have another float precision; other dtypes must match exactly.
- A version that is an adapter is merged into the files of its base as they are read.
- A quantised model takes no version: its tensors are made of the weights, and versions hold the weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.weights.adapter import Adapter

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass
class Piece:
    """Tensors of the files that are converted together, and what they become."""

    target: str  # the first tensor of the module that they fill
    converter: Any = None  # transformers' WeightConverter; None: only the name changes
    sources: dict[str, str] = field(default_factory=dict)  # name in the files -> the converter's pattern for it

    def tensors(self, module: Any, get: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Name in the module -> tensor; `get` reads one from the files."""
        if self.converter is None:
            return {self.target: get(next(iter(self.sources)))}
        work = deepcopy(self.converter)
        for name, pattern in self.sources.items():
            work.add_tensor(self.target, name, pattern, lambda name=name: get(name))
        made = work.convert(self.target, model=module, config=module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Layout:
    """How the tensors of one module are stored in files; the module may be on any device, including meta."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.own: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
        changes = get_model_conversion_mapping(module)
        self._renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        self._converters = [change for change in changes if isinstance(change, WeightConverter)]
        self._by_pattern = {name: change for change in self._converters for name in change.source_patterns}
        self._ignored = [re.compile(name) for name in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]

    def pieces(self, names: Iterable[str]) -> tuple[list[Piece], list[str]]:
        """(pieces made of these names, names the model doesn't know)."""
        found: dict[str, Piece] = {}
        unknown: list[str] = []
        for name in sorted(names, key=dot_natural_key):
            target, pattern = self._target(name, self._renamings, self._converters)
            if target not in self.own and name in self.own:
                target, pattern = self._target(name, [], [])
            if target not in self.own:
                if not any(ignored.search(name) for ignored in self._ignored):
                    unknown.append(name)
                continue
            converter = None if pattern is None else self._by_pattern[pattern]
            # Two names of one tensor are two pieces unless something is converted.
            key = target if converter is not None or target not in found else f"{target}\0{name}"
            found.setdefault(key, Piece(target, converter)).sources[name] = pattern or name
        return list(found.values()), unknown

    def check(self, directory: Path, sources: Mapping[str, Any]) -> list[Piece]:
        """The pieces of these files. Raises WeightsError unless they fill the module exactly."""
        if method := _quantised_by(self._module):
            raise WeightsError(
                f"{directory}: this engine's model is quantised ({method}), and versions hold plain weights, which it "
                "can't take; start it from the model that the trainer started from, or let it only serve"
            )
        pieces, unknown = self.pieces(sources)
        if unknown:
            raise WeightsError(f"{directory}: {len(unknown)} tensors are not in the model, e.g. {unknown[0]}")
        filled: dict[str, list[Piece]] = {}
        for piece in pieces:
            for name, made in self._made(directory, piece, sources).items():
                self._check_tensor(directory, piece, name, made)
                filled.setdefault(name, []).append(piece)
        for names in tied(self.own):
            given = [(name, piece) for name in names for piece in filled.get(name, ())]
            if not given:
                raise WeightsError(f"{directory}: {names[0]} is missing")
            (name, first), *others = given
            for other, piece in others:
                self._check_equal(directory, sources, (name, first), (other, piece))
        return pieces

    def linear_layers(self) -> list[str]:
        """Last parts of the names of torch's linear layers, without the output layer."""
        head = self._module.get_output_embeddings()
        found = {
            name.rpartition(".")[2]
            for name, layer in self._module.named_modules()
            if isinstance(layer, torch.nn.Linear) and layer is not head
        }
        return sorted(found)

    def filled(self, directory: Path, pieces: Iterable[Piece], sources: Mapping[str, Any]) -> set[str]:
        """Names of the module's tensors that these pieces fill. Raises WeightsError for a piece that fills none."""
        return {name for piece in pieces for name in self._made(directory, piece, sources)}

    def _target(self, name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        return rename_source_key(name, renamings, converters, self._module.base_model_prefix, self.own)

    def _made(self, directory: Path, piece: Piece, sources: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Shapes and dtypes of what a piece becomes, without data."""

        def outline(name: str) -> torch.Tensor:
            part = sources[name].get_slice(name)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise WeightsError(f"{directory}: {name} has dtype {part.get_dtype()}, which is not supported")
            return torch.empty(part.get_shape(), dtype=dtype, device="meta")

        try:
            return piece.tensors(self._module, outline)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            names = list(piece.sources)
            raise WeightsError(
                f"{directory}: {len(names)} tensors, e.g. {names[0]}, do not combine into {piece.target}: {error}; is "
                "one missing, or of another shape?"
            ) from error

    def _check_tensor(self, directory: Path, piece: Piece, name: str, made: torch.Tensor) -> None:
        target = self.own.get(name)
        source = next(iter(piece.sources))
        if target is None:
            raise WeightsError(f"{directory}: {source} maps to {name}, which is not in the model")
        if made.shape != target.shape:
            raise WeightsError(
                f"{directory}: {source} has shape {tuple(made.shape)}, the model has {tuple(target.shape)}"
            )
        if not (made.is_floating_point() and target.is_floating_point()) and made.dtype != target.dtype:
            raise WeightsError(f"{directory}: {source} has dtype {made.dtype}, the model has {target.dtype}")

    def _check_equal(
        self, directory: Path, sources: Mapping[str, Any], first: tuple[str, Piece], second: tuple[str, Piece]
    ) -> None:
        left, right = (
            piece.tensors(self._module, lambda source: sources[source].get_tensor(source))[name]
            for name, piece in (first, second)
        )
        if not equal(left, right):
            names = [next(iter(piece.sources)) for _, piece in (first, second)]
            raise WeightsError(f"{directory}: {names[0]} and {names[1]} are tied in the model, but differ here")


class LoadedAdapter:
    """An adapter's open file, checked against the module that it is merged into."""

    def __init__(self, directory: Path, adapter: Adapter, stack: ExitStack) -> None:
        """Raises WeightsError."""
        self._adapter, self._files = adapter, open_weights(directory, stack)

    def check(self, own: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightsError unless the module has the adapter's layers; `own` are its tensors."""
        directory = self._adapter.directory
        tied_names = {name for names in tied(own) if len(names) > 1 for name in names}
        for module, shape in self._adapter.shapes.items():
            name = f"{module}.weight"
            if name not in own or tuple(own[name].shape) != shape:
                had = f"shape {tuple(own[name].shape)}" if name in own else "no such layer"
                raise WeightsError(f"{directory}: the adapter of {module} is for shape {shape}; the model has {had}")
            if name in tied_names:
                raise WeightsError(f"{directory}: {module} is tied in the model, and an adapter would change both")

    def sources(self, pieces: Iterable[Piece]) -> dict[str, str]:
        """Name in the files of the base -> name in the module, of what the adapter changes. Raises WeightsError if
        those files hold a layer in another layout than the model."""
        filled = {piece.target: piece for piece in pieces}
        found: dict[str, str] = {}
        for module in self._adapter.shapes:
            piece = filled.get(f"{module}.weight")
            if piece is None or piece.converter is not None:
                raise WeightsError(
                    f"{self._adapter.directory}: the model's files hold {module} in another layout than transformers; "
                    "leave it out of trainer.lora.target_modules, or use worker.backend hf"
                )
            found[next(iter(piece.sources))] = piece.target
        return found

    def factors(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(A [rank, in], scaled B [out, rank]), float32."""
        return self._adapter.factors(module, lambda part: self._files[part].get_tensor(part))

    def merged(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The tensor of this name in the module, with what the adapter adds."""
        module = name.removesuffix(".weight")
        if module not in self._adapter.shapes:
            return value
        return self._adapter.merged(module, value, lambda part: self._files[part].get_tensor(part))


def is_zero(directory: Path) -> bool:
    """Whether an adapter adds nothing yet, as before its first step."""
    with ExitStack() as stack:
        files = open_weights(directory, stack)
        return not any(files[name].get_tensor(name).any() for name in files if ".lora_B." in name)


def open_weights(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> open file. Raises WeightsError."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise WeightsError(f"{directory}: no *.safetensors files; publish the version again")
    sources: dict[str, Any] = {}
    for path in paths:
        try:
            file = stack.enter_context(safe_open(os.fspath(path), framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path}: incomplete or not a safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 - a safe_open handle is no mapping
            if name in sources:
                raise WeightsError(f"{directory}: {name} is in two files; remove the stale one")
            sources[name] = file
    return sources


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """As torch.equal, which is several times slower than reading both: False for tensors with a NaN."""
    ours, theirs = words(left), words(right)
    if left.dtype != right.dtype or left.shape != right.shape or ours is None or theirs is None:
        return torch.equal(left, right)
    if not torch.equal(ours, theirs):
        return torch.equal(left, right)  # zeros of both signs
    return not has_nan(left)


def has_nan(tensor: torch.Tensor) -> bool:
    """A sum of squares is NaN if one of them is, and only then: isnan is many times slower."""
    return tensor.is_floating_point() and bool(torch.linalg.vector_norm(tensor).isnan())


def words(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its bits, 8 bytes at a time, as int64 of one dimension; None if they can't be seen so."""
    is_aligned = tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0
    return tensor.view(-1).view(torch.int64) if is_aligned and tensor.is_contiguous() else None


def _quantised_by(module: Any) -> str:
    """Name of the method; "" for plain weights, also where transformers has made plain ones of quantised ones."""
    found = getattr(module.config, "quantization_config", None)
    if not found:
        return ""
    named = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", None)
    return str(getattr(named, "value", named) or "unknown method")


def tied(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names grouped by the tensor they stand for."""
    groups: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr() or id(tensor), int(tensor.storage_offset()), tuple(tensor.shape))
        groups.setdefault(key, []).append(name)
    yield from groups.values()
