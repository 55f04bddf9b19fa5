"""A run whose broker, workers and the rest live on hosts of their own."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import redis
from msgspec.structs import replace

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.embedded import find_server
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.status.snapshot import Snapshot
from tests.chaos.blows import PATIENT
from tests.deadlines import HANG_S, RUN_S
from tests.e2e.processes import BIN, Process, end_all, environment, launch
from tests.e2e.stack import ENDLESS, STOPPED, Row, Stack
from tests.hosts.network import Direction, Host, Network

PORT = 6379
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
    """A run over a network, without end until `finish`.

    The test itself reaches the broker from the broker's host, whatever is cut.
    """

    def __init__(self, directory: Path, network: Network, model: Path, rows: list[Row]) -> None:
        self.network = network
        self._server = HostBroker(network.hosts[BROKER], directory / "broker")
        super().__init__(directory, self._server.url, model, rows, "detection")
        # A broker that does not answer is given up soon, so that tests of it are short.
        self.configure(
            broker={"socket_timeout_s": 1.5, "connect_timeout_s": 1.0},
            worker={**PATIENT, "lease_s": 1.5, "renew_s": 0.3},
            sampling={"max_new_tokens": 150},
            data=ENDLESS,
        )
        self._server.wait_ready()

    def start_on(self, host: str, role: str, *options: str, **env: str) -> Process:
        """Start one role, or another command on the run's configuration, on a host."""
        command = [str(BIN / "sluice"), role, "-c", str(self.config_file), *options]
        return self.spawn(self.network.hosts[host].command(command), name=role, **env)

    def start_on_hub(self, role: str) -> Process:
        """Start one role where producer, consumer and trainer are."""
        return self.start_on(HUB, role)

    def start_run(self, worker_host: str, **env: str) -> Process:
        """Start all roles on the hub and a worker, with this in its environment; returns the worker."""
        worker = self.start_on(worker_host, "worker", **env)
        for role in ("produce", "consume", "train"):
            self.start_on_hub(role)
        return worker

    def finish(self, deadline_s: float = RUN_S) -> Snapshot:
        """Let the run come to its end with the epoch reached; until now nothing may have ended by itself."""
        ended = [one for one in self.processes if one.popen.poll() is not None and not one.expendable]
        assert not ended, [process.tail() for process in ended]
        [producer] = [process for process in self.processes if process.name.startswith("produce")]
        producer.expendable = True
        assert producer.terminate(deadline_s) == STOPPED, producer.tail()
        self.end_data()
        self.start_on_hub("produce")
        return super().finish(deadline_s)

    def cut(self, host: str, direction: Direction = "both") -> None:
        """Cut a host off from the broker: what it sends (there), what it is sent (back), or both is lost."""
        self.network.cut(self.network.hosts[host], self.network.hosts[BROKER], direction)

    @property
    def broker_config(self) -> BrokerConfig:
        """The test's own way to it is never cut."""
        return replace(super().broker_config, socket_timeout_s=HANG_S, connect_timeout_s=HANG_S)

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
