"""A run whose broker, workers and the rest live on hosts of their own."""

from __future__ import annotations

import secrets
import signal
import time
from pathlib import Path

import redis

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.embedded import find_server
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.status.snapshot import Snapshot
from tests.deadlines import RUN_S
from tests.e2e.processes import BIN, Process, end_all, environment, launch
from tests.e2e.stack import Row, Stack
from tests.hosts.network import Direction, Host, Network

PORT = 6379
AHEAD = 24  # sequences that the producer may be ahead of the trainer
BROKER, HUB = "broker", "hub"  # the hub: producer, consumer and trainer
_SETTINGS = """\
bind {address}
port {port}
protected-mode yes
requirepass {password}
dir "{directory}"
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""


class HostBroker:
    """A broker on its host's address, with a password, as one runs it for several hosts."""

    def __init__(self, host: Host, directory: Path) -> None:
        password = secrets.token_urlsafe(16)
        self.url = f"redis://:{password}@{host.address}:{PORT}/0"
        self._host, self._mark = host, f"broker-{password}"
        directory.mkdir()
        settings = directory / "broker.conf"
        settings.write_text(_SETTINGS.format(address=host.address, port=PORT, password=password, directory=directory))
        command = host.command([find_server(), str(settings)])
        env = environment(self._mark)
        self._process = launch(command, name="broker", log=directory / "broker.log", env=env, cwd=directory)

    def wait_ready(self, deadline_s: float = RUN_S) -> None:
        """Until it answers on its own host."""
        until = time.monotonic() + deadline_s
        while True:
            try:
                with self._host.inside():
                    connection.ping(BrokerConfig(url=self.url))
                return
            except connection.BrokerError:
                assert time.monotonic() < until, self._process.tail()
                assert self._process.popen.poll() is None, self._process.tail()
                time.sleep(0.02)

    def close(self) -> None:
        """Kill it."""
        end_all([self._process], self._mark)


class HostStack(Stack):
    """A run over a network; the test itself reaches the broker from the broker's host, whatever is cut."""

    def __init__(self, directory: Path, network: Network, model: Path, rows: list[Row]) -> None:
        self.network = network
        self._server = HostBroker(network.hosts[BROKER], directory / "broker")
        super().__init__(directory, self._server.url, model, rows, "detection")
        # A broker that does not answer is given up soon, so that tests of it are short.
        self.configure(
            broker={"socket_timeout_s": 1.5, "connect_timeout_s": 1.0},
            worker={"max_attempts": 1, "lease_s": 1.5, "renew_s": 0.3},  # a lost lease is nobody's death
            sampling={"max_new_tokens": 150},
        )
        self._server.wait_ready()

    def start_on(self, host: str, role: str, *options: str, **env: str) -> Process:
        """Start one role, or another command on the run's configuration, on a host."""
        command = [str(BIN / "sluice"), role, "-c", str(self.config_file), *options]
        return self.spawn(self.network.hosts[host].command(command), name=role, **env)

    def start_on_hub(self, role: str) -> Process:
        """Start one role where producer, consumer and trainer are."""
        return self.start_on(HUB, role)

    def start_paused_run(self, worker_host: str) -> tuple[Process, Process]:
        """Start all roles on the hub and a worker; returns the worker and the producer.

        The producer is stopped when it is as far ahead of the trainer as it may, so that the run cannot end before it
        goes on.
        """
        worker, producer = self.start_on(worker_host, "worker"), self.start_on_hub("produce")
        self.start_on_hub("consume")
        self.wait(lambda now: now.enqueued == AHEAD, "the producer to be as far ahead as it may")
        producer.signal(signal.SIGSTOP)
        self.start_on_hub("train")
        return worker, producer

    def cut(self, host: str, direction: Direction = "both") -> None:
        """Cut a host off from the broker: what it sends (there), what it is sent (back), or both is lost."""
        self.network.cut(self.network.hosts[host], self.network.hosts[BROKER], direction)

    def client(self) -> redis.Redis:
        with self.network.hosts[BROKER].inside():
            client = super().client()
            client.ping()  # a connection stays on the host where it was opened
        return client

    def snapshot(self) -> Snapshot:
        with self.network.hosts[BROKER].inside():
            return super().snapshot()

    def held_by(self, worker: Process) -> set[str]:
        """The jobs whose last lease is this worker's, run out or not."""
        return {job_id for job_id, name in self.leased().items() if name == worker.name}

    def cut_while_it_holds_jobs(self, host: str, worker: Process, direction: Direction) -> set[str]:
        """Cut a worker's host off in the middle of its work; returns the jobs that it held then."""
        until = time.monotonic() + RUN_S
        while time.monotonic() < until:
            if self.held_by(worker):
                self.cut(host, direction)
                # The broker has dealt with all that had reached it when it answers the second time.
                if held := self.held_by(worker) & self.held_by(worker):
                    return held
                self.network.mend()
            time.sleep(0.01)
        raise AssertionError(f"{worker.name} was never seen with jobs\n{self.report(self.snapshot())}")

    def close(self) -> None:
        self.network.mend()
        super().close()
        self._server.close()
