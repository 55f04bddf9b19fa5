"""A directory of safetensors -> the running model, in place.

- Everything is checked from the file headers before the first byte is copied: names, shapes, dtypes.
- Tied parameters are one tensor under several names: one name suffices, and two must agree.
- Float tensors may come in another float precision and are cast; other dtypes must match exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pipeline.errors import TornWeights, WeightsError

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_OTHERS = {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def load_weights(module: torch.nn.Module, directory: Path) -> None:
    """Copy the directory's tensors into the module.

    Raises WeightsError with the module untouched, or TornWeights once a byte may have been copied.
    """
    targets = module.state_dict(keep_vars=True)
    with ExitStack() as stack:
        sources = _open(directory, stack)
        _check(directory, sources, targets)
        try:
            for name, file in sources.items():
                targets[name].copy_(file.get_tensor(name))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise TornWeights(
                f"{directory}: copying the weights failed halfway: {error}; load a version again"
            ) from error


def _open(directory: Path, stack: ExitStack) -> dict[str, Any]:
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


def _check(directory: Path, sources: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsError unless the files fill the module exactly."""
    unknown = sorted(sources.keys() - targets.keys())
    if unknown:
        raise WeightsError(f"{directory}: {len(unknown)} tensors are not in the model, e.g. {unknown[0]}")
    for names in _tied(targets):
        given = [name for name in names if name in sources]
        if not given:
            raise WeightsError(f"{directory}: {names[0]} is missing")
        for name in given:
            _check_tensor(directory, name, sources[name], targets[name])
        first = given[0]
        for name in given[1:]:
            if not torch.equal(sources[first].get_tensor(first), sources[name].get_tensor(name)):
                raise WeightsError(f"{directory}: {first} and {name} are one tensor in the model, but differ here")


def _check_tensor(directory: Path, name: str, file: Any, target: torch.Tensor) -> None:
    part = file.get_slice(name)
    shape, dtype = tuple(part.get_shape()), part.get_dtype()
    if shape != tuple(target.shape):
        raise WeightsError(f"{directory}: {name} has shape {shape}, the model has {tuple(target.shape)}")
    if not (dtype in _FLOATS and target.is_floating_point()) and _OTHERS.get(dtype) != target.dtype:
        raise WeightsError(f"{directory}: {name} has dtype {dtype}, the model has {target.dtype}")


def _tied(targets: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names grouped by the tensor they stand for."""
    groups: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
    for name, tensor in targets.items():
        key = (tensor.data_ptr() or id(tensor), int(tensor.storage_offset()), tuple(tensor.shape))
        groups.setdefault(key, []).append(name)
    yield from groups.values()
