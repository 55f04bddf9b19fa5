"""How a version's files get from the trainer's host to a worker's: `weights.transport`.

    trainer:  staged files ─▶ Carrier.publish ─▶ durable ─▶ WeightsRegistry.register
    worker:   WeightsRegistry.get ─▶ Carrier.fetch ─▶ a verified directory on this host ─▶ load ─▶ probe

| transport   | publish                                    | fetch                                           |
|-------------|--------------------------------------------|-------------------------------------------------|
| `directory` | a directory in the run's, which all share  | that directory, verified once per host          |

A carrier ends in a directory of the hub's layout (or an adapter's) whose digests are those of the manifest. Backends
never know which carrier brought it. Its methods block: call them in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from sluice.pipeline.config.types import Config
from sluice.pipeline.weights import versions
from sluice.pipeline.weights.verified import Verified
from sluice.pipeline.wire.messages import WeightVersion


class Carrier(Protocol):
    """One end of a transport; any thread may call it, and several processes of a host may at the same time."""

    def publish(self, source: Path, manifest: WeightVersion, fence: Callable[[], None]) -> WeightVersion:
        """Make the files of `source` the version `manifest.version`; when it returns, they are durable.

        Returns the manifest as it is registered: with path, digest, shards (if it had none), tensors and base. `fence`
        is called right before the version becomes visible, and may raise to prevent it. Idempotent for equal weights;
        raises WeightsError if the number has others.
        """
        ...

    def fetch(self, manifest: WeightVersion) -> Path:
        """A directory on this host with the version's files, intact; it stays until `remove`. Raises WeightsError."""
        ...

    def remove(self, numbers: Collection[int]) -> None:
        """Delete these versions, and what a killed `publish` has left; unknown numbers are ignored."""
        ...


def carrier_of(config: Config) -> Carrier:
    """The one that the run uses, on whichever host this is."""
    verified = Verified(host_cache(config) / "verified", wait_s=config.weights.load_timeout_s)
    return Directory(Path(config.run_dir) / config.run / "weights", Path(config.model.path), verified)


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

    def remove(self, numbers: Collection[int]) -> None:
        versions.remove(self._root, numbers)
