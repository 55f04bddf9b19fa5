"""The same batches as a torch dataset, for loops that take a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from consumers.handoff.collate import Batch
from consumers.handoff.rollouts import Rollouts
from pipeline.errors import ConfigError

_ONE = (
    "one process reads a run's batches, so that each is given once; use DataLoader(…, batch_size=None, num_workers=0): "
    "they are made ready outside this process anyway"
)


class RolloutDataset(IterableDataset[Batch]):
    """The batches of open `rollouts`; give it to `DataLoader(dataset, batch_size=None, num_workers=0)`."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise ConfigError(_ONE)
        return self._rollouts.batches()

    def __getstate__(self) -> NoReturn:  # workers that are spawned get a copy
        raise ConfigError(_ONE)
