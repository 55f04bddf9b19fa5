"""Where a soak takes place, given root: hosts on a network of their own, a relay in front of the broker, small disks.

    role's host ──link──▶ switch ──▶ broker's host: relay ──▶ broker

Everything is taken down by `close`, whatever happened before.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Literal

from redis.crc import key_slot

from sluice.pipeline.wire.keys import Keys
from tests.e2e.processes import end_all
from tests.e2e.stack import Stack
from tests.failovers import Cluster, Failover
from tests.hosts.clocks import LIBRARY, NEEDED
from tests.hosts.disks import SmallDisk, no_small_disks
from tests.hosts.fleet import Fleet, MemoryGroup, Seat, no_memory_groups
from tests.hosts.network import Host, Network, missing
from tests.hosts.relay import Relay
from tests.soak.battered_broker import BatteredBroker, ReplicatedBroker
from tests.soak.plan import Needs

_RELAY_PORT, _BROKER_PORT = 6379, 6380
_DISKS = {"broker": ("broker-disk", 200), "run": ("runs", 400)}  # name → its place, megabytes
_STARVED_BYTES = 100 << 20
_COMMANDS = {"trainer": "train", "producer": "produce", "consumer": "consume", "worker": "worker"}
BROKER = "broker"


def why_none() -> str | None:
    """Why this machine has no such hosts; None if it has."""
    return missing()


class Site:
    """`network` is up from the start; then `make_broker`, then `make_fleet`."""

    def __init__(self, directory: Path, workers: int, consumers: int) -> None:
        self._directory, self._scope = directory, contextlib.ExitStack()
        self._numbers, self.url = itertools.count(), ""  # the broker's, as roles reach it
        names = ["trainer", "producer"]
        names += [f"consumer-{number}" for number in range(consumers)]
        names += [f"worker-{number}" for number in range(workers)]
        self.names, self.disks = names, dict[str, SmallDisk]()
        self._lacks: dict[Needs, str | None] = {
            "hosts": None,
            "relay": None,
            "disks": no_small_disks(directory),
            "memory": no_memory_groups(),
            "clocks": None if LIBRARY else NEEDED,
        }
        try:
            self.network = Network([BROKER, *names])
            self._scope.callback(self.network.close)
            self.network.open()
            self.broker = self.network.hosts[BROKER]
            self._scope.enter_context(self.broker.inside())  # so is whatever this thread starts from here on
            for name, (place, megabytes) in _DISKS.items():
                if self.lacks("disks") is None:
                    self.disks[name] = disk = SmallDisk(directory / place, megabytes)
                    self._scope.callback(disk.close)
        except BaseException:
            self.close()
            raise

    def lacks(self, needs: Needs) -> str | None:
        """Why faults of this sort can't be had here; None if they can."""
        return self._lacks[needs]

    def disk(self, name: str) -> Path:
        """Its directory, an ordinary one where there can't be small disks."""
        path = self._directory / _DISKS[name][0]
        path.mkdir(exist_ok=True)
        return path

    def make_replicated_broker(self, kind: Literal["sentinel", "cluster"], run: str) -> ReplicatedBroker:
        """It is started. Addresses of servers come from Sentinels and nodes, so no relay can be before them."""
        where = self.disk("broker"), self.broker.address, self.broker.command
        servers = (
            Failover(*where) if kind == "sentinel" else Cluster(*where, replicated=key_slot(Keys(run).prefix.encode()))
        )
        self._scope.callback(servers.close)
        self._lacks["relay"] = "a relay would have to be announced as the server"
        broker = ReplicatedBroker(servers)
        self.url = broker.url
        return broker

    def make_broker(self) -> BatteredBroker:
        """It is started, and the relay before it."""
        broker = BatteredBroker(
            self.disk("broker"), address=self.broker.address, port=_BROKER_PORT, wrap=self.broker.command
        )
        self._scope.callback(broker.kill)
        broker.start()
        self.relay = Relay(self.broker.address, _RELAY_PORT, (broker.address, broker.port))
        self._scope.callback(self.relay.close)
        self.url = f"redis://{self.broker.address}:{_RELAY_PORT}/0"
        return broker

    def make_fleet(self, stack: Stack) -> Fleet:
        """Nothing of it is started."""
        seats = [Seat(name, _COMMANDS[name.partition("-")[0]], self.network.hosts[name]) for name in self.names]
        self.fleet = Fleet(seats, mark=stack.mark, directory=stack.directory, config_file=stack.config_file)
        self._scope.callback(end_all, [], stack.mark)
        self._scope.callback(self.fleet.end)
        return self.fleet

    def host_of(self, name: str) -> Host:
        """The host of a process."""
        return self.network.hosts[name]

    def memory_group(self, name: str) -> MemoryGroup:
        """A new one, with too little memory for a role to start in."""
        group = MemoryGroup(f"{name}-{next(self._numbers)}", _STARVED_BYTES)
        self._scope.callback(group.close)
        return group

    def close(self) -> None:
        """In the reverse order of what was made; the roles' processes must have ended."""
        self._scope.close()
