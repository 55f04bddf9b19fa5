"""A store behind a link that is held to a rate, and the carriers of both ends.

Each transfer takes at least its bytes at the rate, by sleeping. What is compared with a delta, a copy of the whole
version over the same link, takes just that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from sluice.pipeline.config import Config
from sluice.pipeline.weights.carriers import Carrier, carrier_of, host_cache
from sluice.pipeline.weights.host_cache import HostCache
from sluice.pipeline.weights.object_store import ObjectStore
from sluice.pipeline.weights.store import Store
from sluice.pipeline.weights.versions import Ahead
from sluice.pipeline.wire.messages import WeightVersion

_ROOM = 1 << 40
_WAIT_S = 600.0


class HeldStore(ObjectStore):
    """A store of local files; counts what crosses the link."""

    def __init__(self, url: str, rate: float) -> None:
        """`rate` in bytes/s."""
        super().__init__(url, quiet_s=60.0)
        self.rate, self.crossed = rate, 0

    def put(self, source: Path, key: str) -> bool:
        began = time.perf_counter()
        done = super().put(source, key)
        if done:
            self._hold(source.stat().st_size, began)
        return done

    def get(self, key: str, target: Path, size: int, digest: str) -> None:
        began = time.perf_counter()
        super().get(key, target, size, digest)
        self._hold(size, began)

    def _hold(self, size: int, began: float) -> None:
        self.crossed += size
        time.sleep(max(0.0, size / self.rate - (time.perf_counter() - began)))


def store_of(config: Config, mbit_s: int | None) -> HeldStore | None:
    """That of a configuration with `weights.store_url`; `mbit_s` None: as fast as it is."""
    if config.weights.transport == "engine" or not config.weights.store_url:
        return None
    rate = float("inf") if mbit_s is None else mbit_s * 1e6 / 8
    return HeldStore(f"{config.weights.store_url}/{config.run}", rate)


def carrier(config: Config, store: HeldStore | None) -> Carrier:
    """As `carrier_of`, over this store."""
    if store is None:
        return carrier_of(config)
    cache = HostCache(host_cache(config) / "weights", _ROOM, wait_s=_WAIT_S)
    anchor_every = config.weights.anchor_every if config.weights.transport == "delta" else 1
    return Store(Path(config.run_dir) / config.run / "weights", store, cache, anchor_every=anchor_every)


class Timed:
    """A carrier that says when it fetched (`time.monotonic` seconds)."""

    def __init__(self, own: Carrier) -> None:
        self._own = own
        self.began = self.ended = 0.0

    def fetch(self, manifest: WeightVersion) -> Path:
        self.began = time.monotonic()
        found = self._own.fetch(manifest)
        self.ended = time.monotonic()
        return found

    def ahead(self, parent: int) -> Ahead:
        return self._own.ahead(parent)

    def publish(self, source: Path, manifest: WeightVersion, fence: Callable[[], None]) -> WeightVersion:
        return self._own.publish(source, manifest, fence)

    def keep(self, manifest: WeightVersion | None) -> None:
        self._own.keep(manifest)

    def remove(self, numbers: Collection[int]) -> None:
        self._own.remove(numbers)

    def close(self) -> None:
        self._own.close()
