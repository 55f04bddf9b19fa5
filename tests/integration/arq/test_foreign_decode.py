"""Decode jobs of a program that knows only arq, on a worker with the real engine."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from arq.connections import ArqRedis
from arq.jobs import Job, JobStatus
from redis.asyncio import Redis

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.queue import JobFailed
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, SamplingParams, SequenceResult, decode, encode
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.deadlines import HANG_S
from tests.decode_workers import working
from tests.factories import decode_job
from tests.integration.arq.serving import answer, counts, letters, reaches, until
from tests.roles import run_config
from tests.tiny_models import save_tiny_model

FIELDS: dict[str, Any] = {
    "n": 2,
    "messages": [{"role": "user", "content": "hello"}],
    "sampling": {"max_new_tokens": 8},
    "truth": {"x": 1},
    "metadata": {"row": 3},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    worker = {"lease_s": 60.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 4, "drain_s": 0.0}
    return run_config(broker_config, keys, run_dir, worker=worker, model={"path": str(source)})


async def rows(client: Any, keys: Keys) -> list[SequenceResult]:
    return [decode(SequenceResult, row[b"r"]) for _, row in await client.xrange(keys.results + "0") if b"r" in row]


@pytest.mark.parametrize("shape", ["encoded", "map", "fields"])
async def test_all_three_shapes_are_decoded(
    foreign: ArqRedis, client: Redis, keys: Keys, config: Config, backend: HfBackend, shape: str
) -> None:
    job_id = f"{keys.run}:a"
    if shape == "encoded":
        sampling = msgspec.convert(FIELDS["sampling"], SamplingParams)
        made = decode_job("somewhere:else", **{**FIELDS, "sampling": sampling})
        job = await foreign.enqueue_job("decode", encode(made), _job_id=job_id, _queue_name=keys.jobs)
    elif shape == "map":
        job = await foreign.enqueue_job("decode", FIELDS, _job_id=job_id, _queue_name=keys.jobs)
    else:
        job = await foreign.enqueue_job("decode", **FIELDS, _job_id=job_id, _queue_name=keys.jobs)
    async with working(config, backend):
        assert await answer(job) == {"committed": 2}
    found = sorted(await rows(client, keys), key=lambda one: one.index)
    assert [(one.seq_id, one.group_id, one.group_size) for one in found] == [
        (f"{job_id}:{index}", job_id, 2) for index in range(2)
    ]
    for one in found:
        assert 0 < len(one.token_ids) <= 8
        assert (one.truth, one.metadata, one.worker) == ({"x": 1}, {"row": 3}, "w")
    books = await counts(client, keys)
    assert (books["enqueued"], books["committed"], books.get("dead", 0)) == (2, 2, 0), "counted, never refused"
    info = await job.result_info() if job else None
    assert info is not None
    assert (info.function, info.success, info.kwargs, info.job_try) == ("decode", True, {}, 1)


async def test_a_random_id_of_arq_will_do(
    foreign: ArqRedis, client: Redis, keys: Keys, config: Config, backend: HfBackend
) -> None:
    job = await foreign.enqueue_job("decode", **{**FIELDS, "n": 1})
    assert job is not None
    async with working(config, backend):
        assert await answer(job) == {"committed": 1}
    [row] = await rows(client, keys)
    assert row.seq_id == f"{job.job_id}:0"


async def test_a_repeat_is_refused_while_it_runs_and_afterwards(
    foreign: ArqRedis, keys: Keys, config: Config, backend: HfBackend
) -> None:
    job = await foreign.enqueue_job("decode", **FIELDS, _job_id=f"{keys.run}:a")
    assert await foreign.enqueue_job("decode", **FIELDS, _job_id=f"{keys.run}:a") is None
    async with working(config, backend):
        await answer(job)
        assert await foreign.enqueue_job("decode", **FIELDS, _job_id=f"{keys.run}:a") is None


async def test_bad_decode_jobs_between_good_ones(
    foreign: ArqRedis, client: Redis, keys: Keys, config: Config, backend: HfBackend
) -> None:
    bad: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
        "none": ((), {}, "malformed_arguments"),
        "junk": ((b"junk",), {}, "malformed_payload"),
        "both": ((FIELDS,), {"n": 1}, "malformed_arguments"),
        "mistyped": ((), {**FIELDS, "n": "two"}, "malformed_payload"),
        "no-prompt": ((), {"n": 1}, "malformed_payload"),
        "no-n": ((), {**FIELDS, "n": 0}, "malformed_payload"),
        "outside": ((), {"n": 1, "prompt_token_ids": struct.pack("<i", 10**6)}, "invalid_request"),
        "newer": ((), {**FIELDS, "n": 1, "schema": 99}, "unknown_schema"),
    }
    jobs: dict[str, Job | None] = {}
    for name, (args, kwargs, _) in bad.items():
        jobs[name] = await foreign.enqueue_job("decode", *args, **kwargs, _job_id=f"{keys.run}:{name}")
        jobs[f"good-{name}"] = await foreign.enqueue_job("decode", **FIELDS, _job_id=f"{keys.run}:good-{name}")
    async with working(config, backend):
        for name in bad:
            assert await answer(jobs[f"good-{name}"]) == {"committed": 2}
            with pytest.raises(JobFailed):
                await answer(jobs[name])
    found = {job_id.partition(":")[2]: letter.reason for job_id, letter in (await letters(client, keys)).items()}
    assert found == {name: reason for name, (_, _, reason) in bad.items()}


async def test_a_running_decode_job_is_aborted_and_its_neighbour_goes_on(
    foreign: ArqRedis, client: Redis, keys: Keys, config: Config, backend: HfBackend
) -> None:
    doomed = await foreign.enqueue_job(
        "decode", **{**FIELDS, "n": 64, "sampling": {"max_new_tokens": 200}}, _job_id=f"{keys.run}:doomed"
    )
    good = await foreign.enqueue_job("decode", **FIELDS, _job_id=f"{keys.run}:good")
    assert doomed is not None
    async with working(config, backend) as worker:
        await reaches(doomed, JobStatus.in_progress)
        assert await doomed.abort(timeout=HANG_S, poll_delay=0.01) is True
        assert await answer(good) == {"committed": 2}
        await until(lambda: not worker.held(), "the worker to let go of the job")
    ids = [row.seq_id for row in await rows(client, keys)]
    assert {f"{keys.run}:good:{index}" for index in range(2)} <= set(ids)
    books = await counts(client, keys)
    assert books["dropped:cancelled"] > 0
    assert books["dropped:cancelled"] + books["committed"] == 66
    assert len(set(ids)) == len(ids) == books["committed"]
    tombs = [decode(DeadLetter, row[b"d"]) for _, row in await client.xrange(keys.results + "0") if b"d" in row]
    assert {(tomb.state, tomb.reason) for tomb in tombs} == {("dropped", "cancelled")}


async def test_ping_is_answered_by_name(
    foreign: ArqRedis, client: Redis, keys: Keys, config: Config, backend: HfBackend
) -> None:
    async with working(config, backend):
        assert (await answer(await foreign.enqueue_job("ping")))["worker"] == "w"
        missing = await foreign.enqueue_job("pong", _job_id=f"{keys.run}:pong")
        with pytest.raises(JobFailed, match="unknown_function"):
            await answer(missing)
    assert "decode" in (await letters(client, keys))[f"{keys.run}:pong"].detail
