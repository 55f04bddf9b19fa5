"""Publishes versions as the trainer does: written aside, renamed, registered, old ones retired."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from sluice.bench.proximal.versions import Variants
from sluice.pipeline.broker.ownership import Ownership
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.weights.versions import retire, write_version
from sluice.pipeline.wire.keys import Keys


@dataclass(frozen=True)
class Published:
    """Unix seconds: `published_at` is the manifest's, before a byte is written."""

    directory: Path
    published_at: float
    registered_at: float


class Publisher:
    """The trainer's role in a run that has no trainer."""

    def __init__(self, client: Redis, keys: Keys, root: Path, variants: Variants, retention: int) -> None:
        self.owner = Ownership(client, keys, "trainer")
        self._registry = WeightsRegistry(client, keys)
        self._root, self._variants, self._retention = root, variants, retention

    async def publish(self, version: int) -> Published:
        """Raises LeaseLost or WeightsError."""
        await self.owner.confirm()
        at = time.time()
        manifest = self._variants.manifest(version, at)
        full = await asyncio.to_thread(write_version, self._variants.directory(version), self._root, manifest)
        await self._registry.register(full, self.owner.key, self.owner.nonce, self._retention)
        registered_at = time.time()
        await asyncio.to_thread(retire, self._root, version, self._retention)
        return Published(Path(full.path), at, registered_at)
