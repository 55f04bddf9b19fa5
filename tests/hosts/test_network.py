"""The hosts' network itself: a cut is silent, in the direction that was asked for, and ends without a trace."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable

import pytest

from tests.hosts.network import Direction, Host, Network

MakeNetwork = Callable[..., Network]
PORT = 7000
_SOON_S = 0.5


def joined(one: Host, other: Host) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that `one` opened."""
    with other.inside(), socket.create_server((other.address, PORT)) as server:
        with one.inside():
            near = socket.create_connection((other.address, PORT), timeout=5)
        far, peer = server.accept()
    assert peer[0] == one.address
    far.settimeout(5)
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
        assert arrives(near, far, b"hello", 5)
        assert arrives(far, near, b"hello", 5)
        network.cut(one, other, direction)
        assert arrives(near, far, b"there", 5 if there else _SOON_S) is there
        assert arrives(far, near, b"back", 5 if back else _SOON_S) is back
        network.mend()
        for sender, receiver, lost in ((near, far, b"" if there else b"there"), (far, near, b"" if back else b"back")):
            sender.sendall(b".")
            receiver.settimeout(20)  # the sender repeats what was lost at growing intervals
            want, got = lost + b".", b""
            while len(got) < len(want):
                got += receiver.recv(100)
            assert got == want


def test_a_connection_is_not_refused_during_a_cut_but_waited_for(make_network: MakeNetwork) -> None:
    network = make_network("one", "other")
    one, other = network.hosts["one"], network.hosts["other"]
    with one.inside(), pytest.raises(ConnectionRefusedError):
        socket.create_connection((other.address, PORT), timeout=5)
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
