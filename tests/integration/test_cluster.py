"""A real cluster of three primaries: a run lies whole in one slot, and connections follow the slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from arq.connections import RedisSettings, create_pool
from arq.jobs import JobStatus
from redis.asyncio import Redis
from redis.crc import key_slot

from sluice.pipeline.broker import connection as broker
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.streams import Ownership, ack_batches, batch_reader, hand_off, result_reader
from sluice.pipeline.config.types import BrokerConfig, Config, WorkerConfig
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.queue import (
    ArqWorker,
    Claim,
    Credit,
    Finished,
    JobQueue,
    LeaseKeeper,
    arq_deserializer,
    arq_serializer,
    func,
    job_id_for,
)
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys, run_of, tagged
from sluice.pipeline.wire.messages import DeadLetter, TrainingBatch, decode
from tests.deadlines import HANG_S
from tests.factories import decode_job, sequence_result, training_sample
from tests.failovers import PASSWORD, Cluster
from tests.roles import eventually

PLENTY = Credit(max_in_flight=1000, samples_per_version=1000, max_staleness=1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"), node_timeout_s=HANG_S)
    yield made
    made.close()


@pytest.fixture
def settings(cluster: Cluster) -> BrokerConfig:
    return BrokerConfig(url=cluster.url, cluster=True, retry_for_s=HANG_S)


@pytest.fixture
async def client(settings: BrokerConfig, keys: Keys) -> AsyncIterator[Redis]:
    connection = broker.connect(settings, keys.run)
    yield connection
    await connection.aclose()


async def claim(queue: JobQueue) -> list[Claim]:
    return (await queue.claim(8, 30, 3)).claims


def test_all_names_of_a_run_lie_in_one_slot(keys: Keys) -> None:
    job_id = job_id_for(keys.run, "row", 0, None, 1)
    names = [value for value in vars(keys).values() if isinstance(value, str) and value.startswith("sluice:")]
    names += [f"arq:job:{job_id}", f"arq:result:{job_id}", f"arq:in-progress:{job_id}"]
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert run_of(job_id) == run_of(f"{job_id}:0") == run_of(f"{keys.run}:mine") == keys.run


async def test_sequences_go_all_the_way(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys, worker="w")
    names = [tagged(keys.run, name) for name in ("a", "b", "c")]
    assert await queue.enqueue([decode_job(name) for name in names], PLENTY) == ["enqueued"] * 3
    done, failed, cancelled = await claim(queue)
    assert await queue.cancel([cancelled.job_id]) == 1
    assert (await queue.claim(0, 30, 3, 3)).cancelled == [cancelled.job_id]
    assert await queue.commit([Finished(done, sequence_result(done.job_id))]) == ["ok"]
    assert await queue.fail(failed, "invalid_request", "no") == 1
    consumer, trainer = Ownership(client, keys, "consumer:0"), Ownership(client, keys, "trainer")
    for role in (consumer, trainer):
        assert await role.try_acquire()
    reader, batches = result_reader(client, keys, 0, "c", consumer), batch_reader(client, keys, "t", trainer)
    assert await reader.open() == await batches.open() == []
    results = await reader.read(8, block_ms=1)
    assert len(results) == 3
    scripts = Scripts(client)
    batch = TrainingBatch(batch_id="b", samples=[training_sample(f"{done.job_id}:0")])
    ids = [entry.entry_id for entry in results]
    answer = await hand_off(
        scripts,
        keys,
        reader=reader,
        owner_key=consumer.key,
        nonce=consumer.nonce,
        batch=batch,
        result_ids=ids,
        result_bytes=sum(entry.num_bytes for entry in results),
        drops=[],
    )
    assert answer == "ok"
    [entry] = await batches.read(8, block_ms=1)
    assert await ack_batches(scripts, keys, trainer.key, trainer.nonce, [(entry.entry_id, 1)]) == 1
    now = await snapshot(client, keys)
    assert (now.enqueued, now.trained, now.dead, now.dropped) == (3, 1, 1, 1)


async def test_a_stock_arq_client_asks_the_slots_primary(
    cluster: Cluster, settings: BrokerConfig, client: Redis, keys: Keys
) -> None:
    port = cluster.primary_of(key_slot(keys.jobs.encode()))
    stock = RedisSettings(port=port, password=PASSWORD)
    pool = await create_pool(stock, job_serializer=arq_serializer, job_deserializer=arq_deserializer)

    async def shout(ctx: dict[str, Any], word: str) -> str:
        return word.upper()

    config = Config(run=keys.run, broker=settings, worker=WorkerConfig(poll_s=0.01))
    worker = ArqWorker(
        [func(shout, name="shout")], client=client, keys=keys, config=config, burst=True, handle_signals=False
    )
    job = await pool.enqueue_job("shout", "hello", _queue_name=keys.jobs, _job_id=tagged(keys.run, "mine"))
    assert job is not None
    assert await job.status() == JobStatus.queued
    async with asyncio.timeout(HANG_S):
        await worker.main()
        assert await job.result() == "HELLO"
    await pool.aclose(close_connection_pool=True)


async def test_an_id_of_another_slot_is_a_dead_letter_and_stops_nobody(client: Redis, keys: Keys) -> None:
    queue = JobQueue(client, keys, worker="w")
    await client.zadd(keys.jobs, {f"untagged-{number}": 1 for number in range(8)})
    await queue.enqueue([decode_job(tagged(keys.run, "good"))], PLENTY)
    found = [job for _ in range(3) for job in await claim(queue)]
    assert [job.job_id for job in found] == [tagged(keys.run, "good")]
    letters = [decode(DeadLetter, fields[b"d"]) for _, fields in await client.xrange(keys.dead)]
    assert [letter.reason for letter in letters] == ["malformed_id"] * 8


async def test_connections_follow_the_slot(cluster: Cluster, client: Redis, keys: Keys, settings: BrokerConfig) -> None:
    queue, slot = JobQueue(client, keys, worker="w"), key_slot(keys.jobs.encode())
    await queue.enqueue([decode_job(tagged(keys.run, "a"))], PLENTY)
    [held] = await claim(queue)
    config = Config(run=keys.run, broker=settings, worker=WorkerConfig(renew_s=0.1))
    keeper = LeaseKeeper(config, queue, time.monotonic, lambda *lost: None)
    keeper.hold(held)
    keeper.start()

    async def renewed() -> bool:
        return (await client.zscore(keys.leases, held.job_id) or 0) > 1

    await client.zadd(keys.leases, {held.job_id: 1}, xx=True)
    await eventually(renewed, "the keeper to renew")
    target = next(port for port in cluster.ports if port != cluster.primary_of(slot))
    await asyncio.to_thread(cluster.move, slot, target)
    assert cluster.primary_of(slot) == target
    await client.zadd(keys.leases, {held.job_id: 1}, xx=True)
    await eventually(renewed, "the keeper to follow")
    keeper.stop()
    assert await queue.commit([Finished(held, sequence_result(held.job_id))]) == ["ok"]
    assert (await snapshot(client, keys)).committed == 1


def test_a_cluster_and_a_single_server_are_not_confused(
    cluster: Cluster, settings: BrokerConfig, broker_config: BrokerConfig, keys: Keys
) -> None:
    assert broker.ping(settings, keys.run)["cluster_enabled"] == 1
    alone = BrokerConfig(url=f"redis://:{PASSWORD}@127.0.0.1:{cluster.ports[0]}/0")
    with pytest.raises(BrokerError, match=r"--set broker.cluster=true"):
        broker.ping(alone)
    with pytest.raises(BrokerError, match=r"unset broker.cluster|does not answer"):
        broker.ping(BrokerConfig(url=broker_config.url, cluster=True), keys.run)
    with pytest.raises(BrokerError, match=r"write a cluster's nodes as"):
        broker.ping(BrokerConfig(url="redis://:x@/0", cluster=True), keys.run)
