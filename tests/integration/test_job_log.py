"""What the queue's scripts note of a job, live and with what comes of it; and the jobs that are in the queue."""

from __future__ import annotations

import time
from typing import Any

from redis.asyncio import Redis

from sluice.pipeline.config.types import Config
from sluice.pipeline.queue import Call, Claim, Credit, Finished, JobQueue
from sluice.pipeline.queue.dead_letters import DeadLetters, Selection
from sluice.pipeline.queue.live_jobs import JobEvent, LiveJob, live_job, live_jobs, parse_log
from sluice.pipeline.wire.keys import ARQ_JOB, ARQ_RUNNING, Keys
from tests.factories import decode_job, sequence_result

PLENTY = Credit(10_000, 10_000, 1)


def worker(client: Redis, keys: Keys, name: str = "w") -> JobQueue:
    return JobQueue(client, keys, worker=name)


async def claim(queue: JobQueue) -> Claim:
    [claimed] = (await queue.claim(1, 30, 3)).claims
    return claimed


async def run_out(client: Any, keys: Keys, *claims: Claim) -> None:
    for place, each in enumerate(claims, start=1):
        for line in (keys.jobs, keys.leases):
            await client.zadd(line, {each.job_id: place})
        await client.delete(ARQ_RUNNING + each.job_id)


async def live(client: Redis, keys: Keys, name: str = "a") -> LiveJob:
    found = await live_job(client, keys, f"{keys.run}:{name}")
    assert found is not None
    return found


def told(events: list[JobEvent]) -> list[tuple[str, int, str, str]]:
    return [(event.kind, event.attempt, event.worker, event.detail) for event in events]


async def entries(client: Any, stream: str) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in await client.xrange(stream)]


async def test_a_job_that_was_lost_and_claimed_again_brings_its_events(client: Redis, keys: Keys) -> None:
    one, other = worker(client, keys, "one"), worker(client, keys, "other")
    began = time.time()
    await one.enqueue([decode_job(f"{keys.run}:a", n=2)], PLENTY)
    first = await claim(one)
    assert await one.commit([Finished(first, sequence_result(first.job_id, 0, 2))]) == ["ok"]
    assert await one.release([first]) == 1
    await run_out(client, keys, await claim(one))
    last = await claim(other)
    so_far = [
        ("enqueued", 0, "", ""),
        ("claimed", 1, "one", ""),
        ("handed_back", 1, "one", ""),
        ("claimed", 2, "one", ""),
        ("lost", 2, "one", "its lease ran out"),
        ("claimed", 3, "other", ""),
    ]
    assert told((await live(client, keys)).events) == so_far
    result = Finished(last, sequence_result(last.job_id, 1, 2))
    assert await other.commit([result, result]) == ["ok", "dup"]
    early, late = await entries(client, f"{keys.results}0")
    assert early[b"l"] == b""  # the entry that ends the job brings the log
    events = parse_log(late[b"l"])
    assert told(events) == [*so_far, ("ended", 3, "other", "committed")]
    times = [event.at for event in events]
    assert times == sorted(times)
    assert began - 1 <= times[0] <= times[-1] <= time.time() + 1
    assert await live_job(client, keys, last.job_id) is None


async def test_a_repeated_call_is_noted_once(client: Redis, keys: Keys) -> None:
    queue = worker(client, keys)
    for _ in range(2):
        await queue.enqueue([decode_job(f"{keys.run}:a")], PLENTY)
    claimed = await claim(queue)
    queue._num_claims -= 1  # its answer was lost
    assert (await claim(queue)).attempt == claimed.attempt
    for _ in range(2):
        await queue.release([claimed])
    assert told((await live(client, keys)).events) == [
        ("enqueued", 0, "", ""),
        ("claimed", 1, "w", ""),
        ("handed_back", 1, "w", ""),
    ]


async def test_a_dead_job_brings_its_events_with_its_first_letter_and_tombstone(client: Redis, keys: Keys) -> None:
    queue = worker(client, keys, "w\tname\n")
    await queue.enqueue([decode_job(f"{keys.run}:a", n=2)], PLENTY)
    for _ in range(3):
        await queue.release([await claim(queue)], blame="its engine\nfailed" + "é" * 200, most=1)
        if await live_job(client, keys, f"{keys.run}:a") is None:
            break
    for stream in (keys.dead, f"{keys.results}0"):
        first, second = await entries(client, stream)
        events = parse_log(first[b"l"])
        assert [event.kind for event in events] == ["enqueued", *["claimed", "lost"] * 3, "ended"]
        assert events[2].worker == "w name "
        assert events[2].detail.startswith("its engine failed")
        assert events[-1].detail == "worker_deaths"
        assert second[b"l"] == b""
    letters, log = DeadLetters(client, Config(run=keys.run)), (await entries(client, keys.dead))[0][b"l"]
    await letters.drop(Selection(seq_ids=frozenset({f"{keys.run}:a:0"})))
    [left] = await entries(client, keys.dead)
    assert (left[b"i"], left[b"l"]) == (b"1", log)  # it goes where the payload goes


async def test_a_log_keeps_its_newest_lines_and_stays_small(client: Any, keys: Keys) -> None:
    queue = worker(client, keys, "worker-of-a-long-name-" + "x" * 60)
    await queue.enqueue([decode_job(f"{keys.run}:a")], PLENTY)
    for _ in range(40):
        await queue.release([await claim(queue)])
    raw = await client.hget(f"{keys.job_state}{keys.run}:a", "log")
    assert 1500 < len(raw) <= 2000
    events = parse_log(raw)
    assert len(events) == raw.count(b"\n")
    assert [(event.kind, event.attempt) for event in events[-2:]] == [("claimed", 40), ("handed_back", 40)]


async def test_live_jobs_are_counted_and_listed_by_state(client: Any, keys: Keys) -> None:
    queue = worker(client, keys)
    await queue.enqueue([decode_job(f"{keys.run}:run", n=2)], PLENTY)
    running = await claim(queue)
    await queue.commit([Finished(running, sequence_result(running.job_id, 0, 2))])
    await queue.enqueue([decode_job(f"{keys.run}:apart")], PLENTY)
    for _ in range(2):  # two deaths: it runs alone from then on
        await queue.release([await claim(queue)], blame="it died")
    await queue.enqueue([decode_job(f"{keys.run}:r{number}") for number in range(5)], PLENTY)
    await queue.enqueue_calls([Call(job_id=f"{keys.run}:later", function="f", defer_s=600)])
    found = await live_jobs(client, keys)
    assert found.total == {"running": 1, "ready": 5, "deferred": 1, "alone": 1}
    names = [(row.job_id.removeprefix(f"{keys.run}:"), row.state) for row in found.rows]
    ready = [(f"r{number}", "ready") for number in range(5)]
    assert names == [("run", "running"), *ready, ("later", "deferred"), ("apart", "alone")]
    assert found.seen_all
    top = found.rows[0]
    assert (top.worker, top.attempt, top.sequences, top.committed) == ("w", 1, 2, 1)
    assert top.since is not None
    later = found.rows[-2].ready_at
    assert later is not None
    assert 400 < later - time.time() <= 600
    few = await live_jobs(client, keys, state="ready", limit=2)
    assert ([row.job_id for row in few.rows], few.seen_all) == ([f"{keys.run}:r0", f"{keys.run}:r1"], False)
    assert [row.job_id for row in (await live_jobs(client, keys, search=":r3")).rows] == [f"{keys.run}:r3"]


async def test_one_live_job_shows_its_payload_or_why_it_cannot_be_read(client: Any, keys: Keys) -> None:
    queue, job = worker(client, keys), decode_job(f"{keys.run}:a", n=3)
    await queue.enqueue([job], PLENTY)
    found = await live(client, keys)
    assert (found.row.state, found.row.sequences, found.job) == ("ready", 3, job)
    await client.set(ARQ_JOB + job.job_id, b"junk")
    assert "malformed envelope" in (await live(client, keys)).problem
    await client.delete(ARQ_JOB + job.job_id)
    assert "gone" in (await live(client, keys)).problem
    assert await live_job(client, keys, "none") is None
