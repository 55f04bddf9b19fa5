"""The trainer's end: a line of versions for each carrier, each with a run of its own.

optimiser's step ─▶ snapshot ─▶ write ─▶ publish ─▶ register ┈▶ (worker.py) notice ─▶ fetch ─▶ load and prove
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple

from sluice.bench.broker import Broker
from sluice.bench.processes import Fleet, run_settings
from sluice.bench.weights.links import carrier, store_of
from sluice.bench.weights.training import Training
from sluice.bench.weights.worker import Arrived, Work
from sluice.consumers.training.model import staging
from sluice.consumers.training.snapshot import Snapshot
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config import load_config
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.messages import WeightVersion
from sluice.pipeline.wire.tokens import TokenArray

LINKS = (100, 500, 2000)  # Mbit/s
DELTAS = {f"delta-{rate}": rate for rate in LINKS}
CARRIERS = ("directory", "engine", "store", *DELTAS)
_ARRIVES_S = 300.0
_KEPT = 2
_numbers = itertools.count(1)  # of all lines: an engine tells versions apart by them


class Published(NamedTuple):
    """`time.monotonic` seconds."""

    version: int
    began: float
    copied: float
    written: float
    registered: float


class Line:
    """The trainer's end of one run, whose versions travel by one carrier."""

    def __init__(self, name: str, backend: str, home: Path, training: Training, broker: Broker, rows: int) -> None:
        """`rows`: sequences that the worker runs at once."""
        self.mbit_s = DELTAS.get(name)
        self.run, self.version = f"{backend}-{name}", -1
        transport = "delta" if name in DELTAS else name
        stores = [f"weights.store_url={(home / 'store').resolve().as_uri()}"] if transport in ("store", "delta") else []
        self.settings = run_settings(
            self.run, training.source, f"run_dir={home}", "model.dtype=bfloat16", f"weights.transport={transport}",
            "weights.anchor_every=1000", f"weights.cache_dir={home / 'cache'}", f"broker.url={broker.url}",
            f"worker.max_batch={rows}", "worker.checkpoint_tokens=0", "worker.drain_s=0", "weights.load_timeout_s=300",
            *stores,
        )  # fmt: skip
        self.joiner = [*self.settings, f"weights.cache_dir={home / f'cold-{self.run}'}"]
        self._config = config = load_config(None, self.settings)
        self._training, self._versions = training, list[int]()
        self.root = Path(config.run_dir) / config.run / "weights"
        self.root.mkdir(parents=True)
        self.store = store_of(config, None)
        self._carrier = carrier(config, self.store)
        keys = broker.queue(self.run).keys
        self.owner = Ownership(broker.client, keys, "trainer")
        self._registry = WeightsRegistry(broker.client, keys)

    async def publish(self, snapshot: Snapshot, began: float) -> Published:
        """As a trainer does it beside its steps."""
        if self.store is not None and self._versions and self.mbit_s:  # the anchor isn't timed
            self.store.rate = self.mbit_s * 1e6 / 8
        number = next(_numbers)
        made = await asyncio.to_thread(self._publish, snapshot, number, began)
        gone = self._versions[:-_KEPT]
        await self._registry.register(made[1], self.owner.key, self.owner.nonce, gone)
        registered = time.monotonic()
        self.version, self._versions = number, [*self._versions, number]
        await asyncio.to_thread(self._carrier.remove, gone)
        return made[0]._replace(registered=registered)

    def _publish(self, snapshot: Snapshot, number: int, began: float) -> tuple[Published, WeightVersion]:
        snapshot.copy()
        copied = time.monotonic()
        with staging(self.root) as directory:
            shards, score = snapshot.write(self._training.source, directory, self._carrier.ahead(self.version))
            written = time.monotonic()
            manifest = WeightVersion(
                version=number, path="", digest="", probe_token_ids=TokenArray(self._training.probe), probe_score=score,
                parent=self.version, published_at=time.time(), shards=shards, dtype="bfloat16",
            )  # fmt: skip
            full = self._carrier.publish(directory, manifest, lambda: None)
            shutil.rmtree(directory)
        return Published(number, began, copied, written, 0.0), full

    def close(self) -> None:
        """Unlink what it has in memory, and forget its files."""
        self._carrier.close()
        shutil.rmtree(self.root.parent, ignore_errors=True)


class Follower:
    """The engine's process, which follows one line at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.version = 0  # in the engine

    @contextlib.asynccontextmanager
    async def following(self, line: Line, *, held: bool = True) -> AsyncGenerator[None]:
        """It has the line's newest version when the block begins; `held`: its link is."""
        self._fleet.send(Work("serve", line.settings, line.mbit_s if held else None))
        if line.version != self.version:
            await self.arrival(line.version)
        yield
        self._fleet.send("stop")
        while await self._fleet.receive(dict[str, Any], _ARRIVES_S) != [{}]:
            pass

    def check(self) -> None:
        """Raise SluiceError if it has ended."""
        self._fleet.check()

    async def arrival(self, version: int) -> Arrived:
        while True:
            (arrived,) = await self._fleet.receive(Arrived, _ARRIVES_S)
            self.version = arrived.version
            if arrived.version == version:
                return arrived

    async def join(self, line: Line) -> float:
        """Seconds until its newest version is loaded on a host that had nothing of it."""
        work = Work("join", line.joiner, line.mbit_s, line.version)
        (seconds,) = await self._fleet.ask(work, float, _ARRIVES_S)
        self.version = line.version
        return seconds
