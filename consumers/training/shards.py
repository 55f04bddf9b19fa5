"""The tensors of model and optimiser as ranks hold them, in the format of PyTorch's Distributed Checkpoint.

PyTorch keeps the table of a checkpoint's tensors as a pickle, which may hold code. It is read without any: only the
names that such a table needs are known (`_Table`). The tensors themselves are read as data by PyTorch.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup, is_initialized
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor, distribute_tensor

from sluice.pipeline.errors import DataError, DeadlineExceeded

_MODEL, _OPTIMIZER, _TABLE = "model", "optimizer", ".metadata"
_WRITTEN_AS = {"pathlib._local": "pathlib"}  # by Python 3.13, whose tables every Python reads
_KNOWN = {
    "pathlib": {"Path", "PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


def save_shards(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write what this rank has; all ranks call it, and it returns once everything is on disk. Raises DataError."""
    try:
        save(_tensors(model, optimizer), checkpoint_id=directory)
    except CheckpointException as error:
        raise _not_written(directory, error) from error


class ShardsBeside:
    """The same from a copy in the host's memory, written by a thread of each rank: the model may change meanwhile.

    All ranks make it at the same time. `group`: all ranks, with a CPU backend; nothing else may use it.
    """

    def __init__(
        self, directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: ProcessGroup
    ) -> None:
        self._directory = directory
        saving = async_save(_tensors(model, optimizer), checkpoint_id=directory, process_group=group)
        self._saving = cast("Future[Any]", saving)  # with the default stager, which copies before it returns

    def wait(self, limit_s: float) -> None:
        """Return once everything of every rank is on disk. Raises DataError, DeadlineExceeded, and RuntimeError if a
        rank is gone.
        """
        try:
            self._saving.result(limit_s)
        except FutureTimeout as error:
            raise DeadlineExceeded(
                f"{self._directory.parent.parent}: not on disk after {limit_s:g} s; is a disk slow? "
                "Raise trainer.checkpoint_timeout_s, or set trainer.async_checkpoints: false"
            ) from error
        except CheckpointException as error:
            raise _not_written(self._directory, error) from error


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors, moments = get_state_dict(model, optimizer)
    return {_MODEL: tensors, _OPTIMIZER: moments["state"]}


def _not_written(directory: Path, error: CheckpointException) -> DataError:
    """By the rank that failed first; PyTorch's own text is all ranks' stacks."""
    rank, (why, _) = min(error.failures.items())
    return DataError(
        f"{directory.parent.parent}: rank {rank} cannot write its part of the checkpoint ({type(why).__name__}: "
        f"{why}); all ranks need the run's directory, and room in it"
    )


def load_shards(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill what this rank has; all ranks call it, or a process that has the whole model. Raises CheckpointException."""
    tensors, moments = get_state_dict(model, optimizer)
    wanted = {_MODEL: tensors, _OPTIMIZER: moments["state"]}
    load(wanted, storage_reader=_Reader(directory), no_dist=not is_initialized())
    set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=moments)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As in the base class, from names that are known."""
        with (Path(self.path) / _TABLE).open("rb") as file:
            table: Metadata = _Table(file).load()
        if table.storage_meta is not None:
            table.storage_meta.load_id = self.load_id
        return table


class _Table(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = _WRITTEN_AS.get(module, module)
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype) or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{_TABLE} names {module}.{name}, which the table of a checkpoint doesn't need")


def whole(tensor: Any) -> Any:
    """The full tensor of a sharded one, for which all ranks call it; any other value unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether the model is in parts, be it on one rank."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def like(part: Any, value: torch.Tensor) -> torch.Tensor:
    """A full tensor with the layout of a sharded part; every rank has the same, so nothing is sent."""
    if not isinstance(part, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(part.device), part.device_mesh, part.placements, src_data_rank=None)


def gathered(parts: Mapping[str, Any], *, keep: bool) -> dict[str, torch.Tensor]:
    """Copies of the full tensors in the host's memory, tied ones as one; every rank calls it, and those that don't
    `keep` them get none. At most one is whole on the device at a time.
    """
    found: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for name, value in parts.items():
        same = first.setdefault(id(value), name)
        tensor = None if same != name else whole(value.detach())
        if keep:
            found[name] = found[same] if tensor is None else tensor.to("cpu", copy=True)
    return found
