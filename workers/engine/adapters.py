"""LoRA adapters beside the base's weights: what both engines know of them; torch-free.

    request.adapter ─▶ Policies ─▶ Policy: version, parent, the engine's own handle of the adapter
                          ▲
    load_adapter(name) ───┘  between two tokens; sequences of other policies aren't touched

- The run's own policy has the name "". An adapter is a policy too, with a line of versions of its own.
- On an engine that several runs share (fleet.py) each run's policy has a name too, that `run_policy` gives.
- An engine without `AdapterRoom` has the run's policy alone, and merges a version that is an adapter into its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.pipeline.config.suggest import nearest
from sluice.pipeline.config.types import LoraConfig, WorkerConfig
from sluice.pipeline.errors import RequestError, WeightsError
from sluice.pipeline.weights.adapter import Adapter
from sluice.pipeline.weights.versions import ADAPTER_CONFIG, base_digest

OWN = ""  # the name of the run's own policy
_RUN = "@"  # no adapter's name begins with it


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """What an engine must have room for: adapters at once, the policy's included, and their highest rank."""

    count: int
    rank: int

    @classmethod
    def of(cls, worker: WorkerConfig, lora: LoraConfig) -> AdapterRoom | None:
        """None if adapters are merged. Raises WeightsError for files that aren't an adapter's."""
        if worker.lora == "merged":
            return None
        ranks = [lora.rank] if lora.enabled else []
        for directory in map(Path, worker.adapters.values()):
            if (found := Adapter.of(directory)) is None:
                raise no_adapter(directory)
            ranks.append(found.rank)
        return cls(len(ranks), max(ranks))


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """What samples a sequence's next tokens: a version of the run's policy, or of an adapter."""

    version: int
    parent: int | None = None  # the version that `version` was published from; None: the number before
    lora: Any = None  # the engine's handle; None: the engine's weights as they are


class Policies:
    """Those of one engine by name."""

    def __init__(self, version: int) -> None:
        """`version` of the weights that the engine starts with."""
        self._policies = {OWN: Policy(version)}

    def of(self, name: str, where: str = "") -> Policy:
        """Raises RequestError for an adapter that isn't loaded."""
        if (policy := self._policies.get(name)) is None:
            raise RequestError(
                f"{where}: {not_served(name, self.names())}" if where else not_served(name, self.names())
            )
        return policy

    def put(self, name: str, policy: Policy) -> Policy | None:
        """From now on, this is the policy of the name; returns the one before."""
        before = self._policies.get(name)
        self._policies[name] = policy
        return before

    def names(self) -> list[str]:
        """Those of adapters, sorted."""
        return sorted(name for name in self._policies if not may_be_whole(name))

    def check_room(self, name: str, room: AdapterRoom) -> None:
        """Raises WeightsError if another adapter of this name would be one too many."""
        others = sum(policy.lora is not None for other, policy in self._policies.items() if other != name)
        if others >= room.count:
            raise WeightsError(
                f"adapter {name or 'of the policy'!r}: this engine started with room for {room.count} and has them; "
                "start it again with the adapter in worker.adapters"
            )

    def versions(self) -> dict[str, int]:
        """Name -> version; that of the run's own policy under ""."""
        return {name: policy.version for name, policy in self._policies.items()}


def run_policy(run: str) -> str:
    """The name of a run's own policy on an engine that several runs share."""
    return _RUN + run


def may_be_whole(name: str) -> bool:
    """Whether a version of this policy may be the base itself: version 0 of a run is."""
    return name == OWN or name.startswith(_RUN)


def not_served(name: str, names: list[str]) -> str:
    """Why a request for this adapter is refused."""
    if not names:
        return f"no adapter {name!r:.80}: this worker serves none; add it to worker.adapters"
    near = nearest(name, names)
    meant = f"did you mean {near!r}?" if near else f"there are {', '.join(names)}"
    return f"no adapter {name!r:.80}; {meant} (worker.adapters)"


def no_adapter(directory: Path) -> WeightsError:
    return WeightsError(f"{directory}: no {ADAPTER_CONFIG}; a directory with peft's two files is needed")


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).is_file()


def checked(directory: Path, base: Path, room: AdapterRoom | None, policies: Policies, name: str) -> Adapter:
    """The adapter of a directory, for this policy. Raises WeightsError for one that the engine has no room for."""
    if room is None:
        raise WeightsError(
            f"{directory}: this engine keeps no adapters beside its weights; set worker.lora: requests (offline: name "
            "the adapter before the engine starts)"
        )
    if (found := Adapter.of(directory)) is None:
        raise no_adapter(directory)
    policies.check_room(name, room)
    if found.rank > room.rank:
        raise WeightsError(
            f"{directory}: rank {found.rank}, and this engine started with room for rank {room.rank}; start it again "
            "with the adapter in worker.adapters, or with trainer.lora.rank as it is there"
        )
    found.check_base(base)
    return found


def check_whole(directory: Path, base: Path) -> None:
    """Raises WeightsError unless these are the weights that the engine's adapters belong to."""
    if base_digest(directory) != base_digest(base):
        raise WeightsError(
            f"{directory}: whole weights, and other ones than the adapters of this worker belong to ({base}); train "
            "with trainer.lora, or set worker.lora: merged and leave worker.adapters out"
        )
