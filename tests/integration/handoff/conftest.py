"""Runs whose batches are all there, as consumers leave them: they need nobody but a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.broker import connection
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import TrainingBatch, encode
from tests.roles import run_config
from tests.tiny_models import save_tiny_model
from tests.trainers import random_sample


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sync_client(broker_config: BrokerConfig) -> Iterator[Any]:
    """The calls of a training loop block, and so do those of its tests."""
    with connection.connect_sync(broker_config) as client:
        yield client


@pytest.fixture
def make_run(
    broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path, sync_client: Any
) -> Callable[..., Config]:
    """A run with `batches` batches of two samples each; `trainer` options."""

    def make(batches: int, *, last: bool = True, **trainer: Any) -> Config:
        for number in range(batches):
            samples = [random_sample(f"{number}-{member}", 12 + member) for member in range(2)]
            sync_client.xadd(keys.batches, {"b": encode(TrainingBatch(batch_id=str(number), samples=samples))})
            for name in ("enqueued", "accepted"):
                sync_client.hincrby(keys.counts, name, 2)
        if last:
            sync_client.hset(keys.source, "exhausted", 1)
        return run_config(
            broker_config,
            keys,
            run_dir,
            model={"path": str(source)},
            producer={"samples_per_version": 2, "max_in_flight": 64},
            trainer={"batch_wait_s": 0.3, "external": True, **trainer},
        )

    return make
