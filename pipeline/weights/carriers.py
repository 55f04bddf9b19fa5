"""How a version's files get from the trainer's host to a worker's: `weights.transport`.

    trainer:  staged files ─▶ Carrier.publish ─▶ durable ─▶ WeightsRegistry.register
    worker:   WeightsRegistry.get ─▶ Carrier.fetch ─▶ a verified directory on this host ─▶ load ─▶ probe

| transport   | publish                                    | fetch                                           |
|-------------|--------------------------------------------|-------------------------------------------------|
| `directory` | a directory in the run's, which all share  | that directory, verified in place               |

A carrier ends in a directory of the hub's layout (or an adapter's) whose digests are those of the manifest. Backends
never know which carrier brought it. Its methods block: call them in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from sluice.pipeline.config.types import Config
from sluice.pipeline.weights import versions
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
    return Directory(Path(config.run_dir) / config.run / "weights", Path(config.model.path))


class Directory:
    """A directory per version in the run's, on a disk that trainer and workers share."""

    def __init__(self, root: Path, base: Path | None = None) -> None:
        """`root`: where versions are published; `base`: the model directory that adapters are put on."""
        self._root, self._base = root, base

    def publish(self, source: Path, manifest: WeightVersion, fence: Callable[[], None]) -> WeightVersion:
        return versions.write_version(source, self._root, manifest, fence)

    def fetch(self, manifest: WeightVersion) -> Path:
        return versions.verify(manifest, self._base)

    def remove(self, numbers: Collection[int]) -> None:
        versions.remove(self._root, numbers)
