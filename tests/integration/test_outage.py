"""A broker that is killed and comes back: commands wait for it, longer outages end with a named error."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from msgspec.structs import replace
from redis.asyncio import Redis

from sluice.pipeline.broker import connection, retry
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, Own, RoleKey
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.wire.keys import Keys
from tests.blocked_reads import BlockedReads
from tests.deadlines import HANG_S
from tests.killable_broker import KillableBroker
from tests.roles import eventually


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KillableBroker]:
    server = KillableBroker(tmp_path)
    yield server
    server.kill()


async def test_commands_outlast_an_outage_and_a_start_that_is_late(server: KillableBroker) -> None:
    config = BrokerConfig(url=f"redis://127.0.0.1:{server.port}/0", retry_for_s=HANG_S)
    client: Any = connection.connect(config)
    early = asyncio.create_task(client.set("a", 1))
    await asyncio.sleep(0.2)
    assert not early.done()
    server.start()
    assert await early
    server.kill()
    waiting = [asyncio.create_task(client.incr("n")) for _ in range(3)]
    pipe = client.pipeline(transaction=False)
    pipe.get("a")
    waiting.append(asyncio.create_task(pipe.execute()))
    script = asyncio.create_task(Scripts(client).ask(RoleKey(owner="k"), Disown(nonce="nonce")))
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in [*waiting, script])
    server.start()
    await asyncio.gather(*waiting, script)
    await client.aclose()


async def test_an_outage_that_is_too_long_ends_in_an_error_in_time(server: KillableBroker) -> None:
    config = BrokerConfig(url=f"redis://127.0.0.1:{server.port}/0", retry_for_s=0.3)
    client: Any = connection.connect(config)
    with pytest.raises((redis.ConnectionError, OSError)):
        await asyncio.wait_for(client.get("a"), HANG_S)
    await client.aclose()


async def started(server: KillableBroker, timeout_s: float = 0.5) -> Any:
    """A patient client of a running broker with a password; nothing of it is connected yet."""
    server.start()
    await connection.wait_ready(BrokerConfig(url=server.url))
    with connection.connect_sync(BrokerConfig(url=server.url)) as admin:
        admin.config_set("requirepass", "secret")  # type: ignore[no-untyped-call]
    url = server.url.replace("//", "//:secret@")
    return connection.connect(
        BrokerConfig(url=url, retry_for_s=HANG_S, socket_timeout_s=timeout_s, connect_timeout_s=timeout_s)
    )


async def test_a_stalled_broker_that_takes_connections_and_answers_none_is_waited_for(server: KillableBroker) -> None:
    client = await started(server)
    assert await client.set("a", 1)
    server.signal(signal.SIGSTOP)
    held, fresh = asyncio.create_task(client.incr("a")), asyncio.create_task(client.get("b"))
    await asyncio.sleep(1.5)  # three time-outs, of the answer and of the hand-shake
    assert not held.done()
    assert not fresh.done()
    server.signal(signal.SIGCONT)
    await asyncio.wait_for(asyncio.gather(held, fresh), HANG_S)
    await client.aclose()


async def test_a_stalled_broker_that_takes_no_more_bytes_is_waited_for(
    server: KillableBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry._room, "said", {})  # an earlier test's wait would be named for both
    client = await started(server, timeout_s=3.0)
    assert await client.set("a", 1)
    server.signal(signal.SIGSTOP)
    big = asyncio.create_task(client.set("big", bytes(32 << 20)))
    said = ""

    async def waits() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "waiting for the broker" in said

    await eventually(waits, "a time-out of the write")
    assert not big.done()
    server.signal(signal.SIGCONT)
    assert await asyncio.wait_for(big, HANG_S)
    await client.aclose()


@pytest.mark.parametrize(
    ("refuse", "allow"),
    [
        ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    ],
)
async def test_a_broker_that_refuses_for_now_is_asked_again(server: KillableBroker, refuse: str, allow: str) -> None:
    client = await started(server, timeout_s=30.0)  # who asks again for want of an answer may count twice
    reads = await BlockedReads.begin(client)
    await client.execute_command(*refuse.split())
    plain = asyncio.create_task(client.set("a", 1))
    script = asyncio.create_task(Scripts(client).ask(RoleKey(owner="owner"), Own(nonce="me", ttl_ms=1000, renew=False)))
    pipe = client.pipeline(transaction=False)
    pipe.incr("n")
    piped = asyncio.create_task(pipe.execute())
    await asyncio.sleep(0.5)
    waiting = (plain, script, piped, *reads.tasks)
    assert not any(task.done() for task in waiting), waiting
    await client.execute_command(*allow.split())
    assert await asyncio.wait_for(asyncio.gather(plain, script, piped), HANG_S) == [True, 1, [1]]
    await reads.end()
    await client.aclose()


async def test_an_error_that_would_come_again_is_raised_at_once(server: KillableBroker) -> None:
    client = await started(server)
    await client.set("a", "text")
    with pytest.raises(redis.ResponseError, match="integer"):
        await asyncio.wait_for(client.incr("a"), HANG_S)
    await client.aclose()


async def test_many_callers_share_an_outage_and_not_a_line(server: KillableBroker) -> None:
    config = BrokerConfig(url=f"redis://127.0.0.1:{server.port}/0", retry_for_s=2)
    client: Any = connection.connect(config)
    async with asyncio.timeout(HANG_S):  # one after the other they would take 100 s
        ends = await asyncio.gather(*(client.get("a") for _ in range(50)), return_exceptions=True)
    assert all(isinstance(end, redis.ConnectionError | OSError) for end in ends)
    await client.aclose()


async def test_a_role_waits_for_a_broker_and_a_command_does_not(server: KillableBroker) -> None:
    config = BrokerConfig(url=f"redis://127.0.0.1:{server.port}/0", retry_for_s=HANG_S)
    with pytest.raises(BrokerError, match="does not answer"):
        connection.ping(config)
    waiting = asyncio.create_task(connection.wait_ready(config))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    server.start()
    assert "redis_version" in await asyncio.wait_for(waiting, HANG_S)


@pytest.mark.parametrize("steps", range(10))
async def test_a_cancellation_is_heeded_whenever_it_comes(client: Any, steps: int) -> None:
    """In the moment in which the command has been sent, too: it would wait for its answer for ever."""
    await client.ping()  # connected, so that the turns of the loop are always the same ones
    waiting = asyncio.create_task(client.blpop("nothing", 60))
    for _ in range(steps):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=HANG_S)
    assert waiting.cancelled()
    assert await client.echo("in step") == b"in step"


async def test_nobody_gets_the_answer_to_a_command_that_was_cancelled(client: Any) -> None:
    """Connections are used again and again, while their commands are cut off at all moments."""
    chance, heard = random.Random(7), list[bytes]()

    async def ask(number: int) -> None:
        pipe = client.pipeline(transaction=False)
        for part in range(3):
            pipe.echo(f"{number}.{part}")
        parts = [f"{number}.{part}".encode() for part in range(3)]
        assert await client.echo(str(number)) == str(number).encode()
        assert await pipe.execute() == parts
        heard.extend(parts)

    for start in range(0, 2000, 20):
        tasks = [asyncio.create_task(ask(number)) for number in range(start, start + 20)]
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        for task in chance.sample(tasks, 10):
            task.cancel()
        await asyncio.wait(tasks, timeout=HANG_S)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert 3000 <= len(heard) < 6000


async def test_an_answer_that_nobody_took_is_nobody_elses(client: Any) -> None:
    def fail(_answer: object, **_options: object) -> None:
        raise ValueError("unreadable")

    client.set_response_callback("TIME", fail)
    pipe = client.pipeline(transaction=False)
    pipe.time().echo("second").echo("third")
    with pytest.raises(ValueError, match="unreadable"):
        await pipe.execute()
    assert [await client.echo("mine"), await client.echo("yours")] == [b"mine", b"yours"]


async def test_a_connection_that_the_server_has_closed_is_no_outage(server: KillableBroker) -> None:
    """Also where none is waited for."""
    server.start()
    config = BrokerConfig(url=f"redis://127.0.0.1:{server.port}/0", socket_timeout_s=HANG_S, connect_timeout_s=HANG_S)
    impatient = replace(config, retry_for_s=0)
    async with connection.connect(config) as other, connection.connect(impatient) as client:
        await other.ping()
        await client.ping()
        assert await other.client_kill_filter(_type="normal", skipme=True) == 1
        await client.ping()


async def test_a_subscriber_waits_as_long_as_it_says(server: KillableBroker) -> None:
    server.start()
    config = BrokerConfig(url=f"redis://127.0.0.1:{server.port}/0", socket_timeout_s=0.2)
    async with connection.connect(config) as client, client.pubsub() as heard:
        await heard.subscribe("news")
        first = await heard.get_message(timeout=HANG_S)
        nothing = await heard.get_message(timeout=0.6)
        await client.publish("news", "here")
        last = await heard.get_message(timeout=HANG_S)
    assert nothing is None
    assert [one and one["type"] for one in (first, last)] == ["subscribe", "message"], "no second subscription"


async def test_a_cancelled_task_can_still_tell_the_broker(client: Redis, keys: Keys) -> None:
    """What it gives back on its way out gets there."""
    await client.set(keys.latest, 0)

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await client.set(keys.latest, 1)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), await client.get(keys.latest)) == (True, b"1")
