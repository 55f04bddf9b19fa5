"""What a training loop of a test did: on the broker, in its records, among its weights."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice.consumers.training.step_log import read_steps
from sluice.pipeline.broker import connection
from sluice.pipeline.config.types import Config
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S

MakeRun = Callable[..., Config]


def look(config: Config) -> Snapshot:
    async def read() -> Snapshot:
        client = connection.connect(config.broker)
        try:
            return await snapshot(client, Keys(config.run))
        finally:
            await client.aclose()

    return asyncio.run(read())


def manifest_of(config: Config, version: int) -> Any:
    async def read() -> Any:
        client = connection.connect(config.broker)
        try:
            return await WeightsRegistry(client, Keys(config.run)).get(version)
        finally:
            await client.aclose()

    return asyncio.run(read())


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def run_of(config: Config) -> Path:
    return Path(config.run_dir) / config.run


def trained(config: Config) -> list[str]:
    return [seq_id for line in read_steps(run_of(config) / "trained.jsonl") for seq_id in line["seq_ids"]]


def ids(count: int) -> list[str]:
    return [f"{number}-{member}:0" for number in range(count) for member in range(2)]


def ctrl_c(call: Callable[[], Any], when: Callable[[], bool]) -> None:
    """Run it, and interrupt it as Ctrl-C does once it is so."""

    def interrupt() -> None:
        until = time.monotonic() + HANG_S
        while not when() and time.monotonic() < until:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)  # as the kernel does: it wakes the main thread's wait

    main = threading.main_thread().ident or 0
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    thread.join()
