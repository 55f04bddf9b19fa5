"""A real broker that a test can kill and start again."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from sluice.pipeline.broker.embedded import find_server
from tests.deadlines import HANG_S

_DICE = random.SystemRandom()  # two test processes with one seed would choose the same ports


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on, all different.

    Like those of `neighbouring_ports`, none is one that the kernel gives away: between this and the moment when a
    process has imported all that it needs and listens, many others ask for any port.
    """
    ports: list[int] = []
    while len(ports) < count:
        [port] = neighbouring_ports(1)
        if port not in ports:
            ports.append(port)
    return ports


def neighbouring_ports(count: int) -> list[int]:
    """Free ports of loopback, one after the other; none that the kernel gives to whoever asks for any."""
    while True:
        first = _DICE.randrange(16_384, 32_768 - count)
        probes = [socket.socket() for _ in range(count)]
        try:
            for place, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + place))
        except OSError:
            continue  # one of them is in use
        finally:
            for probe in probes:
                probe.close()
        return list(range(first, first + count))


class KillableBroker:
    """A broker on a fixed port that can be killed and started again on its own data.

    `address`: where it listens; `wrap` makes its command one that runs there; `log`: what it writes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
        wrap: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self.address, self.port, self._wrap = address, port or free_ports(1)[0], wrap
        self._options = [
            "--port",
            str(self.port),
            "--bind",
            address,
            "--protected-mode",
            "no",
            "--dir",
            str(directory),
            "--appendonly",
            "yes",
        ]
        self.log = directory / "broker.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()  # one thread may kill what another one is starting

    @property
    def url(self) -> str:
        """Where it listens, also while it is down."""
        return f"redis://{self.address}:{self.port}/0"

    def start(self) -> None:
        """If it isn't running: a second process would find its port taken, and hide the first from `kill`."""
        with self._turn:
            if self._process is None or self._process.poll() is not None:
                command = self._wrap([find_server(), *self._options])
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("ab") as log:
                    self._process = subprocess.Popen(command, stdout=log)

    def signal(self, number: int) -> None:
        """SIGSTOP stalls it, SIGCONT lets it go on."""
        assert self._process, "the broker is not running"
        self._process.send_signal(number)

    def kill(self) -> None:
        with self._turn:
            if self._process:
                self._process.send_signal(signal.SIGKILL)
                self._process.wait(HANG_S)
                self._process = None
