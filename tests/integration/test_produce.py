"""The producer against a real broker: credit, cursor, restarts, malformed rows."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from sluice.pipeline.broker import streams
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, DataConfig, PreflightConfig
from sluice.pipeline.errors import ConfigError, DataError, LeaseLost, first_cause
from sluice.pipeline.queue import NO_LIMIT, Claim, Finished, JobQueue
from sluice.pipeline.queue.trained import LEDGER, TrainedIds
from sluice.pipeline.status.snapshot import Snapshot, snapshot
from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from sluice.producers.source import SourceProgress
from sluice.producers.submit import produce
from tests.deadlines import HANG_S
from tests.factories import sequence_result
from tests.roles import eventually, role_of, run_config


def config_of(
    broker: BrokerConfig, keys: Keys, tmp_path: Path, lines: list[str], *, wide: int = 10_000, **data: Any
) -> Config:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    producer = {"max_in_flight": wide, "samples_per_version": wide, "poll_s": 0.01}
    return run_config(broker, keys, tmp_path / "runs", producer=producer, data=DataConfig(path=str(path), **data))


def row(number: int) -> str:
    return json.dumps({"messages": [{"role": "user", "content": f"q{number}"}], "id": number, "truth": number})


async def queued(client: Any, keys: Keys) -> list[Claim]:
    return (await JobQueue(client, keys).claim(1000, 30, 3)).claims


async def is_full(client: Any, keys: Keys, count: int) -> Snapshot:
    """Wait until the producer says that it waits for credit, with `count` sequences enqueued."""

    async def waits() -> bool:
        now = await snapshot(client, keys)
        causes = [process.waiting_for or "" for process in now.processes]
        return now.enqueued == count and any("credit" in cause for cause in causes)

    await eventually(waits, f"credit to be used up at {count}")
    return await snapshot(client, keys)


async def end(task: asyncio.Task[None], client: Any, keys: Keys) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await let_run_out(client, keys)


async def let_run_out(client: Any, keys: Keys) -> None:
    """The claim to the role of one that has ended without giving it up: its successor would wait seconds for that."""
    await client.delete(f"{keys.owner}producer")


async def test_every_row_of_every_epoch_becomes_a_job(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, [row(i) for i in range(5)], epochs=2)
    await produce(config)
    now = await snapshot(client, keys)
    assert (now.enqueued, now.total, now.exhausted) == (10, 10, True)
    jobs = [claim.job for claim in await queued(client, keys)]
    found = sorted((job.metadata["epoch"], job.truth) for job in jobs if job)
    assert found == [(epoch, number) for epoch in range(2) for number in range(5)]


async def test_running_it_again_enqueues_nothing_twice(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, [row(i) for i in range(4)])
    await produce(config)
    await produce(config)
    assert (await snapshot(client, keys)).enqueued == 4
    await client.hdel(keys.source, "cursor")  # a broker that lost its last second
    await produce(config)
    assert (await snapshot(client, keys)).enqueued == 4


async def test_it_waits_for_credit_and_a_killed_one_goes_on_behind_its_cursor(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, [row(i) for i in range(9)], wide=4)
    first = asyncio.create_task(produce(config))
    await is_full(client, keys, 4)
    await end(first, client, keys)  # no farewell, as after a kill: only what Redis holds survives
    assert await client.hget(keys.source, "cursor") == b"0:3"
    claims = await queued(client, keys)
    assert sorted(claim.job.truth for claim in claims if claim.job) == [0, 1, 2, 3]
    second = asyncio.create_task(produce(config))
    await is_full(client, keys, 4)
    await client.hset(keys.counts, "trained", 4)
    await is_full(client, keys, 8)
    await client.hset(keys.counts, "trained", 8)
    await asyncio.wait_for(second, HANG_S)
    rest = await queued(client, keys)
    assert sorted(claim.job.truth for claim in rest if claim.job) == [4, 5, 6, 7, 8]
    assert (await snapshot(client, keys)).exhausted


async def test_staleness_holds_it_back_until_samples_are_trained(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, [row(i) for i in range(5)], wide=1)
    settings = {"max_in_flight": 100, "samples_per_version": 1, "max_staleness": 2, "poll_s": 0.01}
    config = run_config(broker_config, keys, tmp_path, producer=settings, data=config.data)
    running = asyncio.create_task(produce(config))
    await is_full(client, keys, 3)
    await client.hset(keys.counts, "trained", 2)
    await asyncio.wait_for(running, HANG_S)
    assert (await snapshot(client, keys)).enqueued == 5


async def test_done_jobs_are_not_enqueued_again_after_a_restart(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, [row(0), row(1)])
    await produce(config)
    queue = JobQueue(client, keys)
    claims = (await queue.claim(10, 30, 3)).claims
    assert await queue.commit([Finished(one, sequence_result(one.job_id)) for one in claims]) == ["ok", "ok"]
    await client.hdel(keys.source, "cursor")
    await produce(config)
    now = await snapshot(client, keys)
    assert (now.enqueued, now.queued_jobs) == (2, 0)


async def test_a_malformed_row_stops_it_with_file_and_line(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, [row(0), "{nonsense"])
    with pytest.raises(DataError, match=f"1 of 2 rows malformed, the first at {config.data.path}:2: malformed row"):
        await produce(config)
    assert (await snapshot(client, keys)).enqueued == 0
    config = structs.replace(config, preflight=PreflightConfig(max_s=0))
    with pytest.raises(ExceptionGroup) as caught:
        await produce(config)
    assert (await snapshot(client, keys)).enqueued == 1
    cause = first_cause(caught.value)
    assert isinstance(cause, DataError)
    assert f"{config.data.path}:2: malformed row" in str(cause)


async def test_skipped_rows_are_counted_once_however_often_it_starts(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    lines = [row(0), "{bad", row(1), "{bad", row(2)]
    config = config_of(broker_config, keys, tmp_path, lines, wide=1, on_malformed="skip")
    first = asyncio.create_task(produce(config))
    await is_full(client, keys, 1)
    await end(first, client, keys)
    await client.hset(keys.counts, "trained", 9)
    await client.set(keys.latest, 9)
    for _ in range(2):
        await asyncio.wait_for(produce(config), HANG_S)
    now = await snapshot(client, keys)
    assert (now.enqueued, now.malformed_rows, now.exhausted) == (3, 2, True)


async def test_other_data_under_the_same_run_are_refused(
    broker_config: BrokerConfig, keys: Keys, tmp_path: Path
) -> None:
    await produce(config_of(broker_config, keys, tmp_path, [row(0)]))
    with pytest.raises(ExceptionGroup) as caught:
        await produce(config_of(broker_config, keys, tmp_path, [row(1)]))
    assert isinstance(first_cause(caught.value), ConfigError)


async def test_other_data_are_refused_after_the_last_row_whatever_a_later_start_has_reset(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    rows = [row(i) for i in range(4)]
    await produce(config_of(broker_config, keys, tmp_path, [*rows, "{bad"], on_malformed="skip"))
    await client.hset(keys.source, "exhausted", 0)  # as each start does first
    for others in ([row(7)], [*rows, row(7)]):
        with pytest.raises(ExceptionGroup) as caught:
            await produce(config_of(broker_config, keys, tmp_path, others))
        assert isinstance(first_cause(caught.value), ConfigError)
        await let_run_out(client, keys)
    assert (await snapshot(client, keys)).enqueued == 4
    await produce(config_of(broker_config, keys, tmp_path, [*rows, "{bad"], on_malformed="skip", epochs=2))
    assert (await snapshot(client, keys)).enqueued == 8


async def test_rows_appended_before_the_end_are_read_and_then_the_longer_file_is_the_runs_own(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    async def held() -> bytes:
        return await client.hget(keys.source, "data")

    async def starts_and_ends(lines: list[str]) -> None:
        begun = asyncio.create_task(produce(config_of(broker_config, keys, tmp_path, lines, wide=2)))

        async def has_opened() -> bool:
            now = await snapshot(client, keys)
            return (now.total, now.enqueued) == (len(lines), 2)

        await eventually(has_opened, "the producer to open the file")
        await end(begun, client, keys)

    await starts_and_ends([row(i) for i in range(4)])
    first = await held()
    await starts_and_ends([row(i) for i in range(6)])
    assert await held() == first, "a later start has to warn again"
    for _ in range(2):
        await produce(config_of(broker_config, keys, tmp_path, [row(i) for i in range(6)]))
        now = await snapshot(client, keys)
        assert (now.enqueued, now.exhausted) == (6, True)
    assert await held() != first


async def test_an_empty_file_is_refused_and_exhausted_at_once_where_no_row_is_asked_for(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="no rows"):
        await produce(config_of(broker_config, keys, tmp_path, [""]))
    assert not (await snapshot(client, keys)).exhausted
    await produce(config_of(broker_config, keys, tmp_path, [""], limit=0))
    now = await snapshot(client, keys)
    assert (now.enqueued, now.total, now.complete) == (0, 0, True)


async def test_a_second_producer_waits_until_the_first_has_ended(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "TTL_S", HANG_S)  # whatever holds up the first, its claim doesn't expire
    config = config_of(broker_config, keys, tmp_path, [row(i) for i in range(4)], wide=2)
    first = asyncio.create_task(produce(config))
    async with asyncio.timeout(HANG_S):
        await is_full(client, keys, 2)
        second = asyncio.create_task(produce(config))

        async def waits() -> bool:
            causes = [process.waiting_for or "" for process in (await snapshot(client, keys)).processes]
            return any("another process holds" in cause for cause in causes)

        await eventually(waits, "the second one to wait")
        await client.hincrby(keys.counts, "trained", 4)
        await asyncio.gather(first, second)
    assert (await snapshot(client, keys)).enqueued == 4


async def test_one_that_lost_its_role_meanwhile_enqueues_nothing_more(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, [row(i) for i in range(6)], wide=2)
    late = asyncio.create_task(produce(config))
    await is_full(client, keys, 2)
    both = client.pipeline(transaction=True)
    both.set(f"{keys.owner}producer", "its successor's")
    both.hincrby(keys.counts, "trained", 2)
    await both.execute()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(late, HANG_S)
    assert isinstance(first_cause(caught.value), LeaseLost)
    assert (await snapshot(client, keys)).enqueued == 2
    assert await client.hget(keys.source, "cursor") == b"0:1"


async def test_one_that_lost_its_role_stores_nothing_of_its_source(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, [row(0)])
    async with role_of(config, "producer", "late") as role:
        owner = Ownership(client, keys, "producer")
        await owner.try_acquire()
        progress = SourceProgress(role, owner)
        cursor = await progress.open(1, NO_LIMIT)
        await client.set(owner.key, "its successor's")
        for late in (progress.finish(cursor), progress.open(2, NO_LIMIT)):
            with pytest.raises(LeaseLost):
                await late
    now = await snapshot(client, keys)
    assert (now.total, now.exhausted) == (1, False)


async def test_rows_that_the_broker_loses_before_it_is_told_of_the_end_are_read_again(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [row(0), "{bad", row(1), row(2)]
    config, ends = config_of(broker_config, keys, tmp_path, lines, on_malformed="skip"), list[str]()
    finish = SourceProgress.finish

    async def after_a_loss(progress: SourceProgress, cursor: str) -> None:
        ends.append(cursor)
        if len(ends) == 1:
            newest = (await client.zrange(keys.jobs, -1, -1))[0].decode()
            await client.zrem(keys.jobs, newest)
            await client.delete(ARQ_JOB + newest, keys.job_state + newest)
            await client.hincrby(keys.counts, "enqueued", -1)
            await client.hset(keys.source, "cursor", "0:2")
        await finish(progress, cursor)

    monkeypatch.setattr(SourceProgress, "finish", after_a_loss)
    await asyncio.wait_for(produce(config), HANG_S)
    now = await snapshot(client, keys)
    assert (now.enqueued, now.malformed_rows, now.exhausted, ends) == (3, 1, True, ["0:3", "0:3"])
    assert sorted(claim.job.truth for claim in await queued(client, keys) if claim.job) == [0, 1, 2]


async def test_rows_that_are_trained_are_not_enqueued_again_by_a_broker_without_data(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    config = config_of(broker_config, keys, tmp_path, [row(i) for i in range(250)])
    await produce(config)
    ids = [job.decode() for job in await client.zrange(keys.jobs, 0, -1)]
    ledger = Path(config.run_dir) / config.run / LEDGER
    ledger.parent.mkdir(parents=True, exist_ok=True)
    ledger.write_bytes(msgspec.json.encode({"step": 1, "seq_ids": [f"{job_id}:0" for job_id in ids[:249]]}) + b"\n")
    trained = TrainedIds(ledger.parent)
    trained.open(1)
    trained.close()
    await client.delete(*[name async for name in client.scan_iter(match=f"*{keys.run}*")])
    await produce(config)
    assert [job.decode() for job in await client.zrange(keys.jobs, 0, -1)] == ids[249:]
    assert (await snapshot(client, keys)).exhausted


async def test_rows_before_a_malformed_one_are_enqueued_and_the_mended_file_goes_on(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path
) -> None:
    lines = [row(0), row(1), "{broken", row(3)]
    config = config_of(broker_config, keys, tmp_path, lines, on_malformed="stop")
    config = structs.replace(config, preflight=PreflightConfig(max_s=0))  # the check before didn't reach it
    with pytest.raises((DataError, ExceptionGroup)) as caught:
        await produce(config)
    assert "rows.jsonl:3" in str(first_cause(caught.value))
    await let_run_out(client, keys)
    assert (await snapshot(client, keys)).enqueued == 2
    Path(config.data.path).write_text("\n".join([row(0), row(1), row(2), row(3)]) + "\n")
    await produce(config)
    now = await snapshot(client, keys)
    assert (now.enqueued, now.exhausted) == (4, True)
