"""What deltas weigh, and how long they take over a link that is held to a rate.

The link is the one between a host and the store: each transfer takes at least its bytes at that rate, by sleeping. A
delta crosses it twice, to the store and from it; what it is compared with, a copy of the whole version, once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sluice.bench.harness import say
from sluice.bench.weights.training import Saved
from sluice.pipeline.weights import delta
from sluice.pipeline.weights.host_cache import HostCache
from sluice.pipeline.weights.object_store import ObjectStore
from sluice.pipeline.weights.store import Store
from sluice.pipeline.wire.messages import WeightVersion
from sluice.workers.engine.hf.weights import load_weights

RATES_MBIT = (100, 500, 2000)
_ROOM = 1 << 40


class HeldStore(ObjectStore):
    """A store of local files behind a link; counts what crosses it."""

    def __init__(self, url: str) -> None:
        super().__init__(url, quiet_s=60.0)
        self.rate = float("inf")  # bytes/s
        self.crossed = 0

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


def shares(versions: Sequence[Saved], home: Path) -> list[float]:
    """Of each version's delta from the one before it, in the whole file's bytes."""
    found: list[float] = []
    for before, after in pairwise(versions):
        old, new = (each.directory / "model.safetensors" for each in (before, after))
        found.append(delta.encode(old, new, home / "delta").size / new.stat().st_size)
    return found


def over_links(
    versions: Sequence[Saved], module: torch.nn.Module, home: Path, score: Any
) -> tuple[dict[str, float], dict[str, Any], dict[str, int]]:
    """By Mbit/s: end to end ÷ a copy of the whole version; the parts in seconds; bytes by carrier.

    End to end: from the optimiser's step to the version in the engine, scored.
    """
    ratios: dict[str, float] = {}
    parts: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    size = (versions[0].directory / "model.safetensors").stat().st_size
    for rate in RATES_MBIT:
        root = home / f"link-{rate}"
        store = HeldStore((root / "store").resolve().as_uri())
        trainer, worker = (
            Store(root / end, store, HostCache(root / f"cache-{end}", _ROOM, wait_s=60.0), anchor_every=1000)
            for end in ("weights", "nowhere")
        )
        timed: list[dict[str, float]] = []
        for number, saved in enumerate(versions):
            store.rate = rate * 1e6 / 8 if number else float("inf")
            crossed, began = store.crossed, time.perf_counter()
            manifest = WeightVersion(version=number, path="", digest="", parent=number - 1)
            manifest = trainer.publish(saved.directory, manifest, lambda: None)
            published, sent = time.perf_counter(), store.crossed - crossed
            directory = worker.fetch(manifest)
            fetched = time.perf_counter()
            load_weights(module, directory)
            score()
            worker.keep(manifest)
            loaded = time.perf_counter()
            trainer.remove([number - 1])
            if number:
                timed.append(
                    {
                        "write": saved.write_s,
                        "publish": published - began,
                        "fetch": fetched - published,
                        "load": loaded - fetched,
                    }
                )
                sizes["delta"] = sent
            else:
                sizes |= {"directory": size, "store": sent}
        whole = size / (rate * 1e6 / 8)
        ratios[str(rate)] = median(sum(each.values()) for each in timed) / whole
        parts[str(rate)] = {name: median(each[name] for each in timed) for name in timed[0]} | {"copy": whole}
        say(f"{rate} Mbit/s: {ratios[str(rate)]:.3f} of a copy, {parts[str(rate)]}")
    return ratios, parts, sizes
