"""Real Sentinels over a real primary and its replica: connections follow the primary when it fails over."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Own, RoleKey
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import BrokerError
from tests.blocked_reads import BlockedReads
from tests.deadlines import HANG_S
from tests.failovers import MASTER, PASSWORD, Failover


@pytest.fixture
def failover(tmp_path: Path) -> Iterator[Failover]:
    made = Failover(tmp_path, down_after_s=HANG_S)
    yield made
    made.close()


def settings(failover: Failover, **changes: Any) -> BrokerConfig:
    patient = {"socket_timeout_s": 60, "connect_timeout_s": 60, "retry_for_s": HANG_S}
    return BrokerConfig(**{"url": failover.url, "sentinel_master": MASTER, **patient, **changes})


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_connections_follow_the_primary(failover: Failover, end: int) -> None:
    config = settings(failover)
    client: Any = connection.connect(settings(failover, socket_timeout_s=1, connect_timeout_s=1))
    await client.set("a", 1)
    failover.wait("the replica to have it", lambda: failover.ask(failover.replica, "GET", "a") == b"1")
    with connection.connect_sync(config) as blocking:
        assert blocking.get("a") == b"1"
    failover.signal(failover.primary, end)
    failover.configure("down-after-milliseconds", 1000)
    writes = [asyncio.create_task(client.sadd("written", n)) for n in range(3)]  # one may be sent twice
    script = asyncio.create_task(
        Scripts(client).ask(RoleKey(owner="owner"), Own(nonce="me", ttl_ms=60_000, renew=False))
    )
    await asyncio.wait_for(asyncio.gather(*writes, script), HANG_S)
    assert failover.role_of(failover.replica) == "master"
    failover.wait(
        "all Sentinels to name it", lambda: set(map(failover.named_by, failover.sentinels)) == {failover.replica}
    )
    with connection.connect_sync(config) as blocking:
        assert (blocking.get("a"), blocking.scard("written")) == (b"1", 3)
    assert connection.ping(config)["role"] == "master"
    await client.aclose()


async def test_a_primary_that_was_demoted_under_an_open_connection_is_left(failover: Failover) -> None:
    client: Any = connection.connect(settings(failover, socket_timeout_s=2 * HANG_S))
    await client.set("a", 1)
    reads = await BlockedReads.begin(client)
    failover.configure("failover-timeout", int(1000 * HANG_S))  # else one that the machine stalls is given up
    with redis.Redis(port=failover.sentinels[0], socket_timeout=HANG_S) as sentinel:
        raw: Any = sentinel
        # Until the replica has answered of late, there is none to promote.
        failover.wait("a failover to begin", lambda: raw.execute_command("SENTINEL FAILOVER", MASTER))

    failover.wait("the old primary to follow the new one", lambda: failover.role_of(failover.primary) == "slave")
    assert await asyncio.wait_for(client.set("a", 2), HANG_S)
    with redis.Redis(port=failover.replica, password=PASSWORD) as there:
        assert there.get("a") == b"2"
    await reads.end()
    await client.aclose()


async def test_a_name_that_no_sentinel_knows_is_an_error_that_says_so(failover: Failover) -> None:
    config = settings(failover, sentinel_master="other")
    with pytest.raises(
        BrokerError, match=r"the Sentinels name no primary that is up: .* broker\.sentinel_master is another name"
    ):
        connection.ping(config)
    client: Any = connection.connect(settings(failover, sentinel_master="other", retry_for_s=0.2))
    with pytest.raises(redis.ConnectionError, match="No master found"):
        await asyncio.wait_for(client.get("a"), HANG_S)
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
