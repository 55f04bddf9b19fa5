"""Real servers that fail over: a primary and its replica under three Sentinels, and a cluster."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from sluice.pipeline.broker.embedded import find_server
from tests.deadlines import HANG_S
from tests.killable_broker import free_ports

PASSWORD = "secret"
MASTER = "sluice"
Wrap = Callable[[list[str]], list[str]]
_ANSWER_S = 30.0


class Servers:
    """Server processes by port, all at one address. `wrap` makes a command one that runs there."""

    def __init__(self, directory: Path, address: str, wrap: Wrap) -> None:
        self._directory, self.address, self._wrap = directory, address, wrap
        self._processes, self._options = dict[int, subprocess.Popen[bytes]](), dict[int, tuple[str, ...]]()

    def signal(self, port: int, number: int) -> None:
        self._processes[port].send_signal(number)

    def start_again(self, port: int) -> None:
        """After a SIGKILL, on its own data and with the settings that it has stored since."""
        self._processes[port].wait(HANG_S)
        self._launch(port)

    def start_ended(self) -> None:
        """Start those that have ended, as what supervises servers would."""
        for port, process in self._processes.items():
            if process.poll() is not None:
                self._launch(port)

    def ask(self, port: int, *words: Any) -> Any:
        """One command to one server, without following a redirection."""
        with redis.Redis(self.address, port, password=PASSWORD, socket_timeout=_ANSWER_S) as client:
            raw: Any = client
            connection = raw.connection_pool.get_connection()
            try:
                connection.send_command(*words)
                return connection.read_response()
            finally:
                raw.connection_pool.release(connection)

    def info(self, port: int, section: str = "replication") -> dict[str, Any]:
        with redis.Redis(self.address, port, password=PASSWORD, socket_timeout=_ANSWER_S) as client:
            raw: Any = client
            return raw.info(section)

    def role_of(self, port: int) -> str:
        """master | slave"""
        return str(self.info(port).get("role"))

    def wait(self, cause: str, holds: Any) -> None:
        """Until it holds; a Sentinel ends all connections of the server whose role it changes."""
        until = time.monotonic() + HANG_S
        while True:
            try:
                if holds():
                    return
            except (redis.RedisError, OSError):
                pass
            assert time.monotonic() < until, f"waited for {cause}: {self._states()}"
            time.sleep(0.05)

    def _states(self) -> dict[int, Any]:
        """What each says of its replication, or how it ended."""
        found = dict[int, Any]()
        for port, process in self._processes.items():
            try:
                found[port] = process.poll() or self.info(port)
            except (redis.RedisError, OSError) as error:
                found[port] = error
        return found

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, port: int, settings: str, *options: str) -> None:
        home = self._directory / str(port)
        home.mkdir()
        (home / "server.conf").write_text(f"port {port}\nbind {self.address}\ndir {home}\n{settings}")
        self._options[port] = options
        self._launch(port)

    def _launch(self, port: int) -> None:
        command = [find_server(), str(self._directory / str(port) / "server.conf"), *self._options[port]]
        self._processes[port] = subprocess.Popen(self._wrap(command), stdout=subprocess.DEVNULL)


class Failover(Servers):
    """A primary, a replica and three Sentinels that agree within about two seconds."""

    def __init__(
        self, directory: Path, address: str = "127.0.0.1", wrap: Wrap = list, down_after_s: float = 1.0
    ) -> None:
        """`down_after_s`: without an answer of the primary; a shorter stall of the machine is no failover."""
        super().__init__(directory, address, wrap)
        self.primary, self.replica, *self.sentinels = free_ports(5)
        shared = f"requirepass {PASSWORD}\nmasterauth {PASSWORD}\nappendonly yes\nsave ''\n"
        shared += "repl-diskless-sync-delay 0\n"
        self._start(self.primary, shared)
        self._start(self.replica, f"{shared}replicaof {address} {self.primary}\n")
        self.wait("the replica to follow", lambda: self.info(self.replica).get("master_link_status") == "up")
        for port in self.sentinels:
            watch = f"sentinel monitor {MASTER} {address} {self.primary} 2\nsentinel auth-pass {MASTER} {PASSWORD}\n"
            quick = f"sentinel down-after-milliseconds {MASTER} {int(down_after_s * 1000)}\n"
            quick += f"sentinel failover-timeout {MASTER} 5000\n"
            self._start(port, f"protected-mode no\n{watch}{quick}", "--sentinel")
        for port in self.sentinels:
            self.wait("a Sentinel to answer", lambda port=port: self._hurry(port))
        for port in self.sentinels:
            self.wait("the Sentinels to know each other", lambda port=port: self._knows(port))

    @property
    def url(self) -> str:
        """All Sentinels; the first one is dead, as nobody promises that it lives."""
        return f"redis://:{PASSWORD}@" + ",".join(f"{self.address}:{port}" for port in [1, *self.sentinels]) + "/0"

    @property
    def settings(self) -> dict[str, Any]:
        """The section `broker` of a configuration."""
        return {"sentinel_master": MASTER}

    @property
    def data_ports(self) -> list[int]:
        """The servers that hold the run's data, primary or not."""
        return [self.primary, self.replica]

    def named_by(self, sentinel: int) -> int:
        """The port of the one that this Sentinel names."""
        with redis.Redis(self.address, sentinel, socket_timeout=_ANSWER_S) as client:
            raw: Any = client
            return int(raw.sentinel_get_master_addr_by_name(MASTER)[1])

    def configure(self, option: str, value: int) -> None:
        """`SENTINEL SET`, of all of them."""
        for port in self.sentinels:
            with redis.Redis(self.address, port, socket_timeout=_ANSWER_S) as client:
                client.execute_command("SENTINEL SET", MASTER, option, value)

    def _hurry(self, port: int) -> bool:
        """Let a Sentinel look around several times a second; Redis 6 cannot and is only slower."""
        with redis.Redis(self.address, port, socket_timeout=_ANSWER_S) as client:
            with contextlib.suppress(redis.ResponseError):
                client.execute_command("SENTINEL DEBUG", "info-period", 500, "publish-period", 250)
            return True

    def _knows(self, port: int) -> bool:
        with redis.Redis(self.address, port, socket_timeout=_ANSWER_S) as client:
            raw: Any = client
            state = raw.sentinel_master(MASTER)
            known = state["num-other-sentinels"] == 2 and state["num-slaves"] == 1 and state["is_master"]
            # Only a replica whose own INFO it has read can be promoted.
            return known and raw.sentinel_slaves(MASTER)[0]["master-link-status"] == "ok"


class Cluster(Servers):
    """Three primaries that share the slots; with `replicated`, the run's primary has a replica that can follow it."""

    def __init__(
        self,
        directory: Path,
        address: str = "127.0.0.1",
        wrap: Wrap = list,
        replicated: int = -1,
        node_timeout_s: float = 2.0,
    ) -> None:
        """`replicated`: a slot. `node_timeout_s`: a shorter stall of a node takes no slot away."""
        super().__init__(directory, address, wrap)
        ports, buses = free_ports(4), free_ports(4)
        self.ports = ports[:3]
        for port, bus in list(zip(ports, buses, strict=True))[: 3 if replicated < 0 else 4]:
            text = f"appendonly yes\nsave ''\nrequirepass {PASSWORD}\nrepl-diskless-sync-delay 0\n"
            text += f"masterauth {PASSWORD}\ncluster-enabled yes\ncluster-port {bus}\n"
            text += f"cluster-node-timeout {int(node_timeout_s * 1000)}\n"
            self._start(port, text)
        share = 16384 // 3 + 1
        for k, port in enumerate(self.ports):
            self.wait("a node to answer", lambda port=port: self.ask(port, "PING"))
            slots = range(k * share, min((k + 1) * share, 16384))
            self.ask(port, "CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
            self.ask(port, "CLUSTER", "SET-CONFIG-EPOCH", k + 1)
            for other in range(k):
                self.ask(port, "CLUSTER", "MEET", address, self.ports[other], buses[other])
        for port in self.ports:
            self.wait(
                "the cluster to be up", lambda port=port: b"cluster_state:ok" in self.ask(port, "CLUSTER", "INFO")
            )
            self.wait("the nodes to know each other", lambda port=port: self._knows(port, 3))
        self.data_ports = list(self.ports)
        if replicated >= 0:
            self._replicate(replicated, ports[3], buses[3])

    @property
    def url(self) -> str:
        """Two of the nodes; the first is dead, as nobody promises that it lives."""
        return f"redis://:{PASSWORD}@{self.address}:1,{self.address}:{self.ports[0]}/0"

    @property
    def settings(self) -> dict[str, Any]:
        """The section `broker` of a configuration."""
        return {"cluster": True}

    def primary_of(self, slot: int) -> int:
        """Its port."""
        rows = self.ask(self.ports[0], "CLUSTER", "SLOTS")
        return next(int(node[1]) for first, last, node, *_ in rows if first <= slot <= last)

    def id_of(self, port: int) -> str:
        return self.ask(port, "CLUSTER", "MYID").decode()

    def move(self, slot: int, target: int) -> None:
        """A slot with all of its keys to another node, key by key, as redis-cli does it."""
        source = self.primary_of(slot)
        self.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        while names := self.ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            self.ask(source, "MIGRATE", self.address, target, "", 0, 20_000, "AUTH", PASSWORD, "KEYS", *names)
        for port in (target, source, *self.ports):
            self.ask(port, "CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))

    def _is_up(self, port: int) -> bool:
        return b"cluster_state:ok" in self.ask(port, "CLUSTER", "INFO")

    def _knows(self, port: int, nodes: int) -> bool:
        return f"cluster_known_nodes:{nodes}".encode() in self.ask(port, "CLUSTER", "INFO")

    def _replicate(self, slot: int, port: int, bus: int) -> None:
        primary = self.primary_of(slot)
        self.ask(self.ports[0], "CLUSTER", "MEET", self.address, port, bus)
        for each in (*self.ports, port):
            self.wait("the replica to be known", lambda each=each: self._knows(each, 4))
        self.wait("the replica to follow", lambda: self.ask(port, "CLUSTER", "REPLICATE", self.id_of(primary)) == b"OK")
        self.wait("the replica's data", lambda: self.info(port).get("master_link_status") == "up")
        for each in self.ports:
            self.wait("the replica to be told of", lambda each=each: self._has_replica(each, slot))
        self.data_ports = [primary, port]

    def _has_replica(self, port: int, slot: int) -> bool:
        rows = self.ask(port, "CLUSTER", "SLOTS")
        return any(first <= slot <= last and len(nodes) > 1 for first, last, *nodes in rows)
