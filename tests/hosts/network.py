"""Hosts on one machine: network namespaces with their own addresses, on one switch, whose links can be harmed.

    host ──veth── switch (a bridge in a namespace of its own) ──veth── host

- A cut is silent: the sender addresses its frames to a station that does not exist. It gets no error, nobody answers
  with a reset, and what it sent is lost. This needs no packet filter and works in one direction alone.
- A link that is down, a route that is gone and a link that is slow are harms of one host; each ends by itself.
- Nothing touches the machine's own network: no link, no route, no address there.
- Names carry the pid of the test process, so that what a killed one left behind is swept by the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.deadlines import HANG_S

Direction = Literal["both", "there", "back"]

_PREFIX = "sluice-test"
_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:ff:ff"
_numbers = itertools.count()


class NetworkError(Exception):
    """`ip` refused something; the message is its own."""


def ip(*arguments: str, deadline_s: float = HANG_S) -> str:
    """Run `ip ARGUMENTS…` and return its output; raises NetworkError."""
    return _run("ip", *arguments, deadline_s=deadline_s)


def _run(*command: str, deadline_s: float = HANG_S) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _drop(act: Callable[..., Any], *words: str) -> None:
    """Take something away that a closed network no longer has."""
    with contextlib.suppress(NetworkError):
        act(*words)


@dataclass(frozen=True)
class Host:
    """One namespace with one address."""

    namespace: str
    address: str
    station: str  # its link's hardware address
    port: str = ""  # the switch's end of its link

    def command(self, command: Sequence[str]) -> list[str]:
        """The same command on this host; the process keeps its pid."""
        return ["ip", "netns", "exec", self.namespace, *command]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """What this thread opens inside the block is on this host."""
        with _namespace_file("/proc/thread-self/ns/net") as home:
            with _namespace_file(f"/run/netns/{self.namespace}") as there:
                _enter(there)
            try:
                yield
            finally:
                _enter(home)


class Network:
    """Some hosts that reach each other; `close` takes everything down."""

    def __init__(self, names: Sequence[str]) -> None:
        self._switch = _name("switch")
        self.hosts = {
            name: Host(_name(name), f"10.77.0.{number}", f"02:00:00:00:00:{number:02x}", f"port{number}")
            for number, name in enumerate(names, 1)
        }

    def open(self) -> Network:
        """Make the switch and the hosts."""
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "switch", "up", "type", "bridge")
        for host in self.hosts.values():
            self._plug_in(host)
        self.mend()
        return self

    def cut(self, host: Host, other: Host, direction: Direction = "both") -> None:
        """Lose what `host` sends to `other` (there), what `other` sends to `host` (back), or both."""
        if direction in ("both", "there"):
            _address(host, other, _NOBODY)
        if direction in ("both", "back"):
            _address(other, host, _NOBODY)

    def mend(self) -> None:
        """No host is cut off from another one."""
        for host, other in itertools.permutations(self.hosts.values(), 2):
            _address(host, other, other.station)

    def join(self, host: Host, other: Host) -> None:
        """These two are no longer cut off from each other."""
        _address(host, other, other.station)
        _address(other, host, host.station)

    def unplug(self, host: Host) -> Callable[[], None]:
        """Take its link down at the switch; returns what puts it back."""
        ip("-n", self._switch, "link", "set", host.port, "down")
        return lambda: self._run("link", "set", host.port, "up")

    def unroute(self, host: Host, other: Host) -> Callable[[], None]:
        """What it sends there is refused at once by its own host: no route; returns what puts the route back."""
        route = ("unreachable", f"{other.address}/32")
        ip("-n", host.namespace, "route", "add", *route)
        return lambda: _drop(ip, "-n", host.namespace, "route", "del", *route)

    def narrow(self, host: Host, kbit_s: int) -> Callable[[], None]:
        """Limit what it sends and what it is sent, by a token bucket each; returns what ends that."""
        ends = [(host.namespace, "eth0"), (self._switch, host.port)]
        bucket = ("tbf", "rate", f"{kbit_s}kbit", "burst", "4kb", "latency", "400ms")
        for namespace, device in ends:
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)

        def widen() -> None:
            for namespace, device in ends:
                _drop(_run, "tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

        return widen

    def _run(self, *words: str) -> None:
        _drop(ip, "-n", self._switch, *words)

    def close(self) -> None:
        """Take it down; its links go with their namespaces."""
        for namespace in (self._switch, *(host.namespace for host in self.hosts.values())):
            with contextlib.suppress(NetworkError):  # it was never made
                ip("netns", "del", namespace)

    def _plug_in(self, host: Host) -> None:
        ip("netns", "add", host.namespace)
        link = ("link", "add", "eth0", "address", host.station, "type", "veth")
        ip("-n", host.namespace, *link, "peer", "name", host.port, "netns", self._switch)
        ip("-n", self._switch, "link", "set", host.port, "master", "switch", "up")
        ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        for link_name in ("lo", "eth0"):
            ip("-n", host.namespace, "link", "set", link_name, "up")


@functools.cache
def missing() -> str | None:
    """Why this machine cannot have such networks; None if it can. Sweeps what killed test processes left."""
    if not shutil.which("ip"):
        return "network namespaces need `ip` (iproute2)"
    probe = Network(["probe"])
    try:
        _sweep()
        probe.open()
        with probe.hosts["probe"].inside():
            return None
    except (NetworkError, OSError) as error:
        return f"network namespaces need root and a kernel with veth and bridge: {error}"
    finally:
        probe.close()


def _name(host: str) -> str:
    return f"{_PREFIX}-{os.getpid()}-{next(_numbers)}-{host}"


def _address(sender: Host, receiver: Host, station: str) -> None:
    entry = ("neighbour", "replace", receiver.address, "lladdr", station, "dev", "eth0", "nud", "permanent")
    ip("-n", sender.namespace, *entry)


def _sweep() -> None:
    for line in ip("netns", "list").splitlines():
        namespace = line.split()[0]
        if namespace.startswith(f"{_PREFIX}-") and not Path("/proc", namespace.split("-")[2]).exists():
            for pid in ip("netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", namespace)


@contextlib.contextmanager
def _namespace_file(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(descriptor: int) -> None:
    # os.setns came with Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
