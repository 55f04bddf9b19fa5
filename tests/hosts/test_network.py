"""The hosts themselves: each harm is what it says, ends when it is asked to, and leaves nothing on the machine."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deadlines import HANG_S
from tests.hosts.fleet import no_memory_groups
from tests.hosts.network import Direction, Host, Network, missing
from tests.hosts.relay import Relay
from tests.soak.site import Site

MakeNetwork = Callable[..., Network]
PORT = 7000
_SOON_S = 0.5


def joined(one: Host, other: Host) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that `one` opened."""
    with other.inside(), socket.create_server((other.address, PORT)) as server:
        with one.inside():
            near = socket.create_connection((other.address, PORT), timeout=HANG_S)
        far, peer = server.accept()
    assert peer[0] == one.address
    far.settimeout(HANG_S)
    return near, far


def arrives(sender: socket.socket, receiver: socket.socket, what: bytes, within_s: float) -> bool:
    """Whether a message comes through in time; sending itself never fails."""
    sender.sendall(what)
    receiver.settimeout(within_s)
    try:
        return receiver.recv(100) == what
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    ("direction", "there", "back"), [("both", False, False), ("there", False, True), ("back", True, False)]
)
def test_a_cut_is_silent_and_what_was_sent_arrives_after_it(
    make_network: MakeNetwork, direction: Direction, there: bool, back: bool
) -> None:
    network = make_network("one", "other")
    one, other = network.hosts["one"], network.hosts["other"]
    near, far = joined(one, other)
    with near, far:
        assert arrives(near, far, b"hello", HANG_S)
        assert arrives(far, near, b"hello", HANG_S)
        network.cut(one, other, direction)
        assert arrives(near, far, b"there", HANG_S if there else _SOON_S) is there
        assert arrives(far, near, b"back", HANG_S if back else _SOON_S) is back
        network.mend()
        for sender, receiver, lost in ((near, far, b"" if there else b"there"), (far, near, b"" if back else b"back")):
            sender.sendall(b".")
            receiver.settimeout(HANG_S)  # the sender repeats what was lost at growing intervals
            want, got = lost + b".", b""
            while len(got) < len(want):
                got += receiver.recv(100)
            assert got == want


def test_a_connection_is_not_refused_during_a_cut_but_waited_for(make_network: MakeNetwork) -> None:
    network = make_network("one", "other")
    one, other = network.hosts["one"], network.hosts["other"]
    with one.inside(), pytest.raises(ConnectionRefusedError):
        socket.create_connection((other.address, PORT), timeout=HANG_S)
    for direction in ("both", "there", "back"):
        network.cut(one, other, direction)
        with one.inside(), pytest.raises(TimeoutError):
            socket.create_connection((other.address, PORT), timeout=_SOON_S)
        network.mend()


def test_the_machines_own_network_is_left_alone(make_network: MakeNetwork) -> None:
    def own() -> str:
        return subprocess.run(["ip", "-br", "address"], capture_output=True, text=True, check=True).stdout

    before = own()
    network = make_network("one")
    with network.hosts["one"].inside():
        assert network.hosts["one"].address in own()
    assert own() == before
    network.close()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert network.hosts["one"].namespace not in listed


def test_a_link_that_is_down_a_route_that_is_gone_and_a_slow_link_end_when_asked(make_network: MakeNetwork) -> None:
    network = make_network("one", "other")
    one, other = network.hosts["one"], network.hosts["other"]
    near, far = joined(one, other)
    with near, far:
        plug_in = network.unplug(one)
        assert not arrives(near, far, b"a", _SOON_S)
        plug_in()
        far.settimeout(HANG_S)
        assert far.recv(1) == b"a"
        route = network.unroute(one, other)
        with one.inside(), pytest.raises(OSError, match="No route to host"):
            socket.create_connection((other.address, PORT), timeout=HANG_S)
        route()
        widen = network.narrow(one, 256)
        began, size = time.monotonic(), 32 << 10
        threading.Thread(target=near.sendall, args=(bytes(size),)).start()
        assert received(far, size) >= size
        assert time.monotonic() - began > 0.5  # 32 KiB at 32 KB/s, but for the bucket's 4
        widen()
        assert arrives(near, far, b"b", HANG_S)


def received(receiver: socket.socket, size: int) -> int:
    got = 0
    receiver.settimeout(HANG_S)
    while got < size:
        got += len(receiver.recv(1 << 16))
    return got


def test_a_relay_delays_and_stalls_one_peer_in_one_direction(make_network: MakeNetwork) -> None:
    network = make_network("one", "two", "server")
    one, two, far = (network.hosts[name] for name in ("one", "two", "server"))
    with far.inside(), socket.create_server((far.address, PORT)) as server:
        relay = Relay(far.address, PORT + 1, (far.address, PORT))
        try:
            pairs: list[tuple[socket.socket, socket.socket]] = []
            for host in (one, two):
                with host.inside():
                    near = socket.create_connection((far.address, PORT + 1), timeout=HANG_S)
                pairs.append((near, server.accept()[0]))
            (near, end), (other, other_end) = pairs
            again = relay.stall(one.address, "there")
            assert not arrives(near, end, b"x", _SOON_S)
            assert arrives(end, near, b"y", HANG_S)
            assert arrives(other, other_end, b"z", HANG_S)
            again()
            end.settimeout(HANG_S)
            assert end.recv(1) == b"x"
            at_once = relay.delay(one.address, _SOON_S)
            began = time.monotonic()
            assert arrives(end, near, b"late", HANG_S)
            assert time.monotonic() - began >= _SOON_S
            at_once()
        finally:
            relay.close()
            for each in (near, end, other, other_end):
                each.close()


def left_on_the_machine() -> list[str]:
    """Namespaces, mounts and cgroups of tests of this process."""
    mark = f"sluice-test-{os.getpid()}"
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    groups = [str(group) for group in Path("/sys/fs/cgroup").glob(f"*/{mark}*")]
    return [line for line in [*listed, *Path("/proc/mounts").read_text().splitlines(), *groups] if mark in line]


def test_a_site_leaves_nothing_whatever_happened_on_it(tmp_path: Path) -> None:
    if reason := missing() or no_memory_groups():
        pytest.skip(reason)
    before, home = left_on_the_machine(), Path("/proc/thread-self/ns/net").readlink()
    site = Site(tmp_path, 1, 1)
    idle = None
    try:
        site.make_broker()
        host, group = site.host_of("worker-0"), site.memory_group("worker-0")
        site.network.unplug(host)
        site.network.narrow(site.broker, 64)
        site.relay.stall(host.address, "both")
        for disk in site.disks.values():
            disk.fill()
        idle = subprocess.Popen(["sh", "-c", f"echo $$ > {group.path}/tasks; exec sleep 60"])
        assert len(left_on_the_machine()) > len(before)
    finally:
        site.close()
        if idle is not None:
            idle.kill()
            idle.wait()
    assert left_on_the_machine() == before
    assert Path("/proc/thread-self/ns/net").readlink() == home
