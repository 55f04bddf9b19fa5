"""Directories of safetensors, checked against a model from their headers alone.

- Names are those of the module, or those that its `save_pretrained` writes (some models rename on the way).
- Tied parameters are one tensor under several names: one name suffices, and two must agree.
- Float tensors may come in another float precision; other dtypes must match exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.core_model_loading import revert_weight_conversion

from pipeline.errors import WeightsError

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_OTHERS = {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def module_targets(module: Any, wanted: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """The module's own tensors by their names in it and by their names on disk; on any device, also meta.

    The names on disk are left out where those in the module are all that is `wanted`.
    """
    own: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    if wanted is not None and own.keys() >= set(wanted):
        return own
    kept = {id(tensor) for tensor in own.values()}
    saved = {name: tensor for name, tensor in revert_weight_conversion(module, own).items() if id(tensor) in kept}
    return {**saved, **own}


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
            raise WeightsError(f"{path}: not a whole safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 - a safe_open handle is no mapping
            if name in sources:
                raise WeightsError(f"{directory}: {name} is in two files; remove the stale one")
            sources[name] = file
    return sources


def check_weights(directory: Path, sources: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsError unless the files fill the targets exactly."""
    unknown = sorted(sources.keys() - targets.keys())
    if unknown:
        raise WeightsError(f"{directory}: {len(unknown)} tensors are not in the model, e.g. {unknown[0]}")
    for names in tied(targets):
        given = [name for name in names if name in sources]
        if not given:
            raise WeightsError(f"{directory}: {names[0]} is missing")
        for name in given:
            _check_tensor(directory, name, sources[name], targets[name])
        first = given[0]
        for name in given[1:]:
            if not torch.equal(sources[first].get_tensor(first), sources[name].get_tensor(name)):
                raise WeightsError(f"{directory}: {first} and {name} are one tensor in the model, but differ here")


def tied(targets: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names grouped by the tensor they stand for."""
    groups: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
    for name, tensor in targets.items():
        key = (tensor.data_ptr() or id(tensor), int(tensor.storage_offset()), tuple(tensor.shape))
        groups.setdefault(key, []).append(name)
    yield from groups.values()


def _check_tensor(directory: Path, name: str, file: Any, target: torch.Tensor) -> None:
    part = file.get_slice(name)
    shape, dtype = tuple(part.get_shape()), part.get_dtype()
    if shape != tuple(target.shape):
        raise WeightsError(f"{directory}: {name} has shape {shape}, the model has {tuple(target.shape)}")
    if not (dtype in _FLOATS and target.is_floating_point()) and _OTHERS.get(dtype) != target.dtype:
        raise WeightsError(f"{directory}: {name} has dtype {dtype}, the model has {target.dtype}")
