"""Real Sentinels over a real primary and its replica: connections follow the primary when it fails over."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.embedded import find_server
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Own, RoleKey
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import BrokerError
from tests.killable_broker import free_ports

PASSWORD = "secret"
MASTER = "sluice"


class Failover:
    """A primary, a replica and three Sentinels that agree within about two seconds."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._processes = directory, dict[int, subprocess.Popen[bytes]]()
        self.primary, self.replica, *self.sentinels = free_ports(5)
        shared = f"bind 127.0.0.1\nrequirepass {PASSWORD}\nmasterauth {PASSWORD}\nappendonly yes\nsave ''\n"
        shared += "repl-diskless-sync-delay 0\n"
        self._start(self.primary, shared)
        self._start(self.replica, f"{shared}replicaof 127.0.0.1 {self.primary}\n")
        self.wait("the replica to follow", lambda: self._info(self.replica).get("master_link_status") == "up")
        for port in self.sentinels:
            watch = f"sentinel monitor {MASTER} 127.0.0.1 {self.primary} 2\nsentinel auth-pass {MASTER} {PASSWORD}\n"
            quick = f"sentinel down-after-milliseconds {MASTER} 1000\nsentinel failover-timeout {MASTER} 5000\n"
            self._start(port, f"bind 127.0.0.1\n{watch}{quick}", "--sentinel")
        for port in self.sentinels:
            self.wait("a Sentinel to answer", lambda port=port: self._hurry(port))
        for port in self.sentinels:
            self.wait("the Sentinels to know each other", lambda port=port: self._knows(port))

    @property
    def url(self) -> str:
        """All Sentinels; the first one is dead, as nobody promises that it lives."""
        return f"redis://:{PASSWORD}@" + ",".join(f"127.0.0.1:{port}" for port in [1, *self.sentinels]) + "/0"

    def signal(self, port: int, number: int) -> None:
        self._processes[port].send_signal(number)

    def role_of(self, port: int) -> str:
        return str(self._info(port).get("role"))

    def wait(self, cause: str, holds: Any) -> None:
        """Until it holds; a Sentinel ends all connections of the server whose role it changes."""
        until = time.monotonic() + 60
        while True:
            try:
                if holds():
                    return
            except (redis.RedisError, OSError):
                pass
            assert time.monotonic() < until, f"waited for {cause}"
            time.sleep(0.05)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, port: int, settings: str, *options: str) -> None:
        home = self._directory / str(port)
        home.mkdir()
        (home / "server.conf").write_text(f"port {port}\ndir {home}\n{settings}")
        command = [find_server(), str(home / "server.conf"), *options]
        self._processes[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def _hurry(self, port: int) -> bool:
        """Let a Sentinel look around several times a second; Redis 6 cannot and is only slower."""
        with redis.Redis(port=port, socket_timeout=2) as client:
            with contextlib.suppress(redis.ResponseError):
                client.execute_command("SENTINEL DEBUG", "info-period", 500, "publish-period", 250)
            return True

    def _knows(self, port: int) -> bool:
        with redis.Redis(port=port, socket_timeout=2) as client:
            raw: Any = client
            state = raw.sentinel_master(MASTER)
            known = state["num-other-sentinels"] == 2 and state["num-slaves"] == 1 and state["is_master"]
            # Only a replica whose own INFO it has read can be promoted.
            return known and raw.sentinel_slaves(MASTER)[0]["master-link-status"] == "ok"

    def _info(self, port: int) -> dict[str, Any]:
        with redis.Redis(port=port, password=PASSWORD, socket_timeout=2) as client:
            raw: Any = client
            return raw.info("replication")


@pytest.fixture
def failover(tmp_path: Path) -> Iterator[Failover]:
    made = Failover(tmp_path)
    yield made
    made.close()


def settings(failover: Failover, **changes: Any) -> BrokerConfig:
    return BrokerConfig(
        **{"url": failover.url, "sentinel_master": MASTER, "socket_timeout_s": 1, "connect_timeout_s": 1, **changes}
    )


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_connections_follow_the_primary(failover: Failover, end: int) -> None:
    config = settings(failover)
    client: Any = connection.connect(config)
    await client.set("a", 1)
    assert await client.wait(1, 5000) == 1, "the replica has it"
    with connection.connect_sync(config) as blocking:
        assert blocking.get("a") == b"1"
    failover.signal(failover.primary, end)
    writes = [asyncio.create_task(client.incr("a")) for _ in range(3)]
    script = asyncio.create_task(
        Scripts(client).ask(RoleKey(owner="owner"), Own(nonce="me", ttl_ms=60_000, renew=False))
    )
    await asyncio.wait_for(asyncio.gather(*writes, script), 80)
    assert failover.role_of(failover.replica) == "master"
    with connection.connect_sync(config) as blocking:
        assert blocking.get("a") == b"4"
    assert connection.ping(config)["role"] == "master"
    await client.aclose()


async def test_a_primary_that_was_demoted_under_an_open_connection_is_left(failover: Failover) -> None:
    client: Any = connection.connect(settings(failover))
    await client.set("a", 1)
    with redis.Redis(port=failover.sentinels[0], socket_timeout=5) as sentinel:
        raw: Any = sentinel
        raw.execute_command("SENTINEL FAILOVER", MASTER)

    failover.wait("the old primary to follow the new one", lambda: failover.role_of(failover.primary) == "slave")
    assert await asyncio.wait_for(client.set("a", 2), 60)
    with redis.Redis(port=failover.replica, password=PASSWORD) as there:
        assert there.get("a") == b"2"
    await client.aclose()


async def test_a_name_that_no_sentinel_knows_is_an_error_that_says_so(failover: Failover) -> None:
    config = settings(failover, sentinel_master="other")
    with pytest.raises(BrokerError, match="No master found for 'other'"):
        connection.ping(config)
    client: Any = connection.connect(settings(failover, sentinel_master="other", retry_for_s=0.2))
    with pytest.raises(redis.ConnectionError, match="No master found"):
        await asyncio.wait_for(client.get("a"), 30)
    await client.aclose()


@pytest.mark.parametrize(
    ("url", "hosts", "server"),
    [
        ("redis://a", [("a", 26379)], {}),
        ("redis://:p%40w@a:1,b,c:3/2", [("a", 1), ("b", 26379), ("c", 3)], {"password": "p@w", "db": 2}),
        ("rediss://u:p@[::1]:7/0", [("::1", 7)], {"username": "u", "password": "p", "db": 0, "ssl": True}),
    ],
)
def test_how_an_address_of_sentinels_is_read(url: str, hosts: list[tuple[str, int]], server: dict[str, Any]) -> None:
    assert connection.node_addresses(BrokerConfig(url=url, sentinel_master=MASTER), 26379) == (hosts, server)


@pytest.mark.parametrize("url", ["redis://a,,b/0", "redis://:secret@a:port/0", "http://a:secret@b"])
def test_an_address_that_is_none_is_an_error_without_its_password(url: str) -> None:
    with pytest.raises(BrokerError) as caught:
        connection.node_addresses(BrokerConfig(url=url, sentinel_master=MASTER), 26379)
    assert "secret" not in str(caught.value)
