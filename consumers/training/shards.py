"""The tensors of model and optimiser as ranks hold them, in the format of PyTorch's Distributed Checkpoint.

PyTorch keeps the table of a checkpoint's tensors as a pickle, which may hold code. It is read without any: only the
names that such a table needs are known (`_Table`). The tensors themselves are read as data by PyTorch.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed import is_initialized
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_MODEL, _OPTIMIZER, _TABLE = "model", "optimizer", ".metadata"
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
    """Write what this rank has; all ranks call it, and it returns once everything is on disk."""
    tensors, moments = get_state_dict(model, optimizer)
    save({_MODEL: tensors, _OPTIMIZER: moments["state"]}, checkpoint_id=directory)


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
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype) or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{_TABLE} names {module}.{name}, which the table of a checkpoint doesn't need")
