"""Role processes inside a test: a real broker, real signals left alone, a run of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from sluice.pipeline.config.types import (
    BrokerConfig,
    Config,
    ConsumerConfig,
    ModelConfig,
    ProducerConfig,
    RolloutMatchingConfig,
    TrainerConfig,
    WorkerConfig,
)
from sluice.pipeline.run.role import Role, role_process
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SamplingParams
from tests.deadlines import HANG_S

SECTIONS: dict[str, Any] = {
    "consumer": ConsumerConfig,
    "model": ModelConfig,
    "producer": ProducerConfig,
    "rollout_matching": RolloutMatchingConfig,
    "sampling": SamplingParams,
    "trainer": TrainerConfig,
    "worker": WorkerConfig,
}


def run_config(broker: BrokerConfig, keys: Keys, run_dir: Path, **sections: Any) -> Config:
    """A run's configuration; sections are given as dicts of the keys that differ from the defaults."""
    made = {name: SECTIONS[name](**value) if name in SECTIONS else value for name, value in sections.items()}
    return Config(run=keys.run, run_dir=str(run_dir), broker=broker, **made)


@contextlib.asynccontextmanager
async def role_of(config: Config, role: str = "worker", name: str = "w") -> AsyncIterator[Role]:
    """A role that stops when its `stop` is set."""
    async with role_process(config, role, name, asyncio.Event()) as made:
        yield made


async def eventually(holds: Callable[[], Awaitable[bool]], cause: str, deadline_s: float = HANG_S) -> None:
    """Poll until it holds; a failure names what did not happen."""
    until = time.monotonic() + deadline_s
    while not await holds():
        assert time.monotonic() < until, f"waited {deadline_s} s for {cause}"
        await asyncio.sleep(0.01)
