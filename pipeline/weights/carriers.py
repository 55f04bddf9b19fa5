"""How a version's files get from the trainer's host to a worker's: `weights.transport`.

    trainer:  staged files ─▶ Carrier.publish ─▶ durable ─▶ WeightsRegistry.register
    worker:   WeightsRegistry.get ─▶ Carrier.fetch ─▶ a verified directory on this host ─▶ load ─▶ probe

| transport   | publish                                    | fetch                                           |
|-------------|--------------------------------------------|-------------------------------------------------|
| `directory` | a directory in the run's, which all share  | that directory, verified once per host          |
| `store`     | that one, and a copy in an object store    | a copy in this host's cache                     |
| `delta`     | the same, most versions as what changed    | the same, made from the last one or an anchor   |
| `engine`    | as one of those, and in shared memory      | the copy in memory, verified; elsewhere as that |

A carrier ends in a directory of the hub's layout (or an adapter's) whose digests are those of the manifest. Backends
never know which carrier brought it. Its methods block: call them in a thread.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import WeightsError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.weights import versions
from sluice.pipeline.weights.host_cache import Verified
from sluice.pipeline.weights.shared_memory import MEMORY, Segments
from sluice.pipeline.wire.messages import WeightVersion


class Carrier(Protocol):
    """One end of a transport; any thread may call it, and several processes of a host may at the same time."""

    def ahead(self, parent: int) -> versions.Ahead:
        """For the time in which files of the version after `parent` are written: tell what it gives of each.

        What `publish` needs of them is made beside; whatever becomes of that, only its time depends on it.
        """
        ...

    def publish(self, source: Path, manifest: WeightVersion, fence: Callable[[], None]) -> WeightVersion:
        """Make the files of `source` the version `manifest.version`; when it returns, they are durable.

        Returns the manifest as it is registered: with path, digest, shards (if it had none), tensors and base. `fence`
        is called right before the version becomes visible, and may raise to prevent it. Idempotent for equal weights;
        raises WeightsError if the number has others.
        """
        ...

    def fetch(self, manifest: WeightVersion) -> Path:
        """A directory on this host with the version's files, intact; it stays until `remove`, or the next `keep`.

        Raises WeightsError: nothing has changed on this host then.
        """
        ...

    def keep(self, manifest: WeightVersion | None) -> None:
        """This version is in use now, and no other one that this process has fetched; None: none of them is."""
        ...

    def remove(self, numbers: Collection[int]) -> None:
        """Delete these versions, and what a killed `publish` has left; unknown numbers are ignored."""
        ...

    def close(self) -> None:
        """Let go of what this process has fetched or shows in memory, as its end does. Safe to call twice."""
        ...


def _untold(**_facts: Any) -> None:
    """Nobody listens."""


def carrier_of(config: Config, tell: Callable[..., None] = _untold) -> Carrier:
    """The one that the run uses, on whichever host this is; `tell` gets facts about it, from any thread."""
    base, transport = Path(config.model.path), config.weights.transport
    if transport in ("store", "delta") or (transport == "engine" and config.weights.store_url):
        durable = _store(config, base)
    else:
        verified = Verified(host_cache(config) / "verified", wait_s=config.weights.load_timeout_s)
        durable = Directory(Path(config.run_dir) / config.run / "weights", base, verified)
    return SharedMemory(durable, config.run, base, tell) if transport == "engine" else durable


def _store(config: Config, base: Path) -> Carrier:
    # Here, since fsspec and what it opens take a while to import.
    from sluice.pipeline.weights.host_cache import HostCache
    from sluice.pipeline.weights.object_store import ObjectStore
    from sluice.pipeline.weights.store import Store

    weights, run_dir = config.weights, Path(config.run_dir) / config.run
    url = (
        f"{weights.store_url.rstrip('/')}/{config.run}"
        if weights.store_url
        else f"file://{(run_dir / 'deltas').resolve()}"
    )
    cache = HostCache(host_cache(config) / "weights", int(weights.cache_gb * (1 << 30)), wait_s=weights.load_timeout_s)
    return Store(
        run_dir / "weights",
        ObjectStore(url, quiet_s=weights.store_timeout_s),
        cache,
        base=base,
        anchor_every=weights.anchor_every if weights.transport == "delta" else 1,
    )


def host_cache(config: Config) -> Path:
    """This user's directory on this host, for what runs have fetched or verified there."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"
    return Path(config.weights.cache_dir) if config.weights.cache_dir else default


class Directory:
    """A directory per version in the run's, on a disk that trainer and workers share."""

    def __init__(self, root: Path, base: Path | None = None, verified: Verified | None = None) -> None:
        """`root`: where versions are published; `base`: the model directory that adapters are put on.

        `verified`: what this host has verified so far; None: every fetch reads every byte.
        """
        self._root, self._base, self._verified = root, base, verified

    def ahead(self, parent: int) -> versions.Ahead:
        """Files are linked, not made of others."""
        return nullcontext()

    def publish(self, source: Path, manifest: WeightVersion, fence: Callable[[], None]) -> WeightVersion:
        return versions.write_version(source, self._root, manifest, fence)

    def fetch(self, manifest: WeightVersion) -> Path:
        return versions.verify(manifest, self._base, check=self._check)

    def _check(self, manifest: WeightVersion, directory: Path) -> None:
        if self._verified is None:
            versions.check_files(manifest, directory)
            return
        names = manifest.shards or [file.name for file in versions.deciding_files(directory)]
        self._verified.once(directory, manifest.digest, names, lambda: versions.check_files(manifest, directory))

    def keep(self, manifest: WeightVersion | None) -> None:
        """Only `remove` deletes here."""

    def remove(self, numbers: Collection[int]) -> None:
        versions.remove(self._root, numbers)

    def close(self) -> None:
        """It holds nothing."""


class SharedMemory:
    """A durable carrier, with a copy of the newest versions in the memory of the trainer's host.

    What can't be shown or used there comes the durable way, which is logged and counted.
    """

    def __init__(
        self,
        durable: Carrier,
        run: str,
        base: Path | None = None,
        tell: Callable[..., None] = _untold,
        root: Path = MEMORY,
    ) -> None:
        """`base`: the model directory that adapters are put on; `tell` gets `weight_fallbacks`; `root`: a tmpfs."""
        self._durable, self._base, self._tell = durable, base, tell
        self._segments = Segments(root, run)
        self._fallbacks = 0

    def ahead(self, parent: int) -> versions.Ahead:
        return self._durable.ahead(parent)

    def publish(self, source: Path, manifest: WeightVersion, fence: Callable[[], None]) -> WeightVersion:
        """The copy is made at the same time, and shown when the version is durable."""
        with ThreadPoolExecutor(1, thread_name_prefix="memory") as pool:
            copying = pool.submit(self._copy, source)
            try:
                full = self._durable.publish(source, manifest, fence)
            except BaseException:
                if (copy := copying.result()) is not None:
                    shutil.rmtree(copy, ignore_errors=True)
                raise
            if (copy := copying.result()) is not None:
                self._segments.show(copy, full)
        return full

    def _copy(self, source: Path) -> Path | None:
        try:
            return self._segments.copy(source)
        except (OSError, WeightsError) as error:
            self._fall_back("the version isn't in shared memory; workers load the durable one", error)
            return None

    def fetch(self, manifest: WeightVersion) -> Path:
        for found in self._segments.find(manifest):
            try:
                linked = self._segments.link(found, manifest.shards)
            except FileNotFoundError:
                continue  # retired: there are newer ones
            except OSError as error:
                self._fall_back("can't use shared memory; taking the durable version", error)
                break
            try:
                return versions.verify(manifest, self._base, linked)
            except WeightsError as error:
                self._segments.drop(linked)
                self._fall_back("the copy in shared memory is damaged; taking the durable version", error)
        return self._durable.fetch(manifest)

    def keep(self, manifest: WeightVersion | None) -> None:
        self._segments.keep(manifest)
        self._durable.keep(manifest)

    def remove(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._segments.remove(number)
        self._durable.remove(numbers)

    def close(self) -> None:
        self._segments.close()
        self._durable.close()

    def _fall_back(self, event: str, error: Exception) -> None:
        self._fallbacks += 1
        self._tell(weight_fallbacks=self._fallbacks)
        get_logger().warning(event, error=str(error), fallbacks=self._fallbacks)
