"""Score jobs between trainer and scorers, on a real broker; the scorers here make their numbers up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.queue.scores import ScoreJobs, Scores, TakenJob, refusal
from sluice.pipeline.status.descriptions import waits
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.wire.keys import SCORE_GROUP, Keys
from sluice.pipeline.wire.messages import encode
from tests.roles import eventually, role_of, run_config
from tests.score_jobs import LONG_S, all_of, job, names, nothing_is_left, put, scored, scorer, serve


async def test_every_job_is_answered_once_and_nothing_stays(client: Any, keys: Keys) -> None:
    jobs = [job(f"a:{number}", number % 3) for number in range(200)]
    serving = asyncio.create_task(serve(scorer(client, keys), len(jobs)))
    found = await Scores(client, keys, "t").ask([*jobs, jobs[0]], LONG_S)
    assert sorted((one.seq_id, one.scored_version) for one in found) == sorted((j.seq_id, j.version) for j in jobs)
    assert all((list(one.positions), list(one.logprobs)) == ([0, 2], [-1.0, -1.0]) for one in found)
    order = await serving
    assert [int(name[2:]) % 3 for name in order] == sorted(int(name[2:]) % 3 for name in order)
    await nothing_is_left(client, keys)


async def test_without_a_scorer_an_ask_ends_with_nothing_and_takes_its_jobs_back(client: Any, keys: Keys) -> None:
    assert await Scores(client, keys, "t").ask([job("a:0"), job("a:1")], 0.2) == []
    assert await Scores(client, keys, "t").ask([], LONG_S) == []
    await nothing_is_left(client, keys)
    assert await scorer(client, keys).take(8, 1) == []


async def test_a_trainer_that_stops_to_wait_takes_its_jobs_back(client: Any, keys: Keys) -> None:
    asking = asyncio.create_task(Scores(client, keys, "t").ask([job("a:0"), job("a:1")], LONG_S))

    async def is_out() -> bool:
        return await client.xlen(keys.score_jobs) == 2

    await eventually(is_out, "the jobs")
    asking.cancel()
    await asyncio.wait([asking])
    await nothing_is_left(client, keys)


async def test_what_came_in_time_is_returned(client: Any, keys: Keys) -> None:
    await client.rpush(keys.score_answers + "t", encode(scored(TakenJob("0-1", job("a:0")))[1]))
    found = await Scores(client, keys, "t").ask([job("a:0"), job("a:1")], 0.1)
    assert [one.seq_id for one in found] == ["a:0"]
    await nothing_is_left(client, keys)


async def test_an_answer_to_a_job_that_was_taken_back_goes_nowhere(client: Any, keys: Keys) -> None:
    await put(client, keys, job("a:0", reply_to="t"))
    jobs = scorer(client, keys)
    [taken] = await all_of(jobs, 1)
    await client.xdel(keys.score_jobs, taken.entry_id)
    assert await jobs.answer([scored(taken)]) == 0
    await nothing_is_left(client, keys)


async def test_answers_of_an_earlier_ask_and_junk_are_discarded(client: Any, keys: Keys) -> None:
    stale = refusal("a:0", 7, "an earlier version"), scored(TakenJob("0-1", job("b:0")))[1]
    for raw in (b"junk", *map(encode, stale)):
        await client.rpush(keys.score_answers + "t", raw)
    serving = asyncio.create_task(serve(scorer(client, keys), 1, -2.0))
    [found] = await Scores(client, keys, "t").ask([job("a:0")], LONG_S)
    assert (found.seq_id, found.scored_version, list(found.logprobs)) == ("a:0", 1, [-2.0, -2.0])
    await serving
    await nothing_is_left(client, keys)


async def test_answers_of_a_trainer_that_died_vanish(client: Any, keys: Keys) -> None:
    await put(client, keys, job("a:0", reply_to="dead"))
    await serve(scorer(client, keys), 1)
    assert 0 < await client.pttl(keys.score_answers + "dead") <= 600_000


async def test_what_nobody_waits_for_is_not_scored(client: Any, keys: Keys) -> None:
    seconds, _ = await client.time()
    await put(
        client, keys, job("old:0", reply_to="t", expires_at=seconds - 1.0), job("new:0", expires_at=seconds + 60.0)
    )
    taken = await all_of(scorer(client, keys), 1)
    assert names(taken) == ["new:0"]
    assert not taken[0].has_expired
    assert 30 < taken[0].until - time.monotonic() <= 60
    assert await client.xlen(keys.score_jobs) == 1
    assert await client.exists(keys.score_answers + "t") == 0


async def test_a_silent_scorers_job_goes_to_another_and_is_answered_once(client: Any, keys: Keys) -> None:
    asking = asyncio.create_task(Scores(client, keys, "t").ask([job("a:0")], LONG_S))
    first, second = scorer(client, keys, "first"), scorer(client, keys, "second", 0.05)
    lost = await all_of(first, 1)
    again = await all_of(second, 1)
    assert names(again) == names(lost) == ["a:0"]
    assert await second.answer([scored(again[0], -2.0)]) == 1
    assert await first.answer([scored(lost[0], -2.0)]) == 0  # it comes back late
    [found] = await asking
    assert list(found.logprobs) == [-2.0, -2.0]


async def test_a_scorer_that_works_long_keeps_its_jobs(client: Any, keys: Keys) -> None:
    await put(client, keys, job("a:0"), job("a:1"))
    first, second = scorer(client, keys, "first", 0.03), scorer(client, keys, "second")
    ids = [one.entry_id for one in await all_of(first, 2)]
    await client.xclaim(keys.score_jobs, SCORE_GROUP, "first", 0, ids, idle=100_000, justid=True)
    keeping = asyncio.create_task(first.keep())

    async def renewed() -> bool:
        rows = await client.xpending_range(keys.score_jobs, SCORE_GROUP, "-", "+", 10)
        assert [row["times_delivered"] for row in rows] == [1, 1]
        return all(row["time_since_delivered"] < 60_000 for row in rows)

    await eventually(renewed, "the leases to be renewed")
    keeping.cancel()
    assert await second.take(8, 1) == []


async def test_a_scorer_that_leaves_gives_its_jobs_back_at_once(client: Any, keys: Keys) -> None:
    await put(client, keys, job("a:0"), job("a:1"))
    first, second = scorer(client, keys, "first"), scorer(client, keys, "second")
    await all_of(first, 2)
    assert await second.take(8, 1) == []
    await first.release()
    assert sorted(names(await second.take(8, 1))) == ["a:0", "a:1"]
    await first.release()  # it holds nothing any more
    assert await scorer(client, keys, "third").take(8, 1) == []


async def test_a_job_that_kills_its_scorers_is_answered_with_an_error(client: Any, keys: Keys) -> None:
    asking = asyncio.create_task(Scores(client, keys, "t").ask([job("a:0")], LONG_S))
    for number in range(3):
        assert names(await all_of(scorer(client, keys, f"s{number}", 0.02), 1)) == ["a:0"]
    last = scorer(client, keys, "s3", 0.02)
    await eventually(lambda: _none_left(last, client, keys), "the job to be given up")
    [found] = await asking
    assert (found.seq_id, found.scored_version, len(found.logprobs)) == ("a:0", 1, 0)
    assert "3 scorers" in found.error


async def test_malformed_jobs_are_discarded_and_answered_where_that_can_be(client: Any, keys: Keys) -> None:
    newer = msgspec.msgpack.encode(
        {"kind": "score_job", "schema": 99, "seq_id": "a:9", "version": 4, "reply_to": "t", "more": [1]}
    )
    cut = encode(job("a:0", reply_to="t"))[:-5]
    nested = b"\x81\xa1x" + b"\x91" * 100_000
    for raw in (b"", b"junk", cut, nested, encode(refusal("a:1", 1, "no job")), newer):
        await client.xadd(keys.score_jobs, {"s": raw})
    await client.xadd(keys.score_jobs, {"another": "field"})
    await put(client, keys, job("good:0", reply_to="t"))
    jobs = scorer(client, keys)
    taken = await all_of(jobs, 1)
    assert names(taken) == ["good:0"]
    await jobs.answer([scored(taken[0])])
    answers = [msgspec.msgpack.decode(raw) for raw in await client.lrange(keys.score_answers + "t", 0, -1)]
    assert {one["seq_id"]: "upgrade" in one.get("error", "") for one in answers} == {"a:9": True, "good:0": False}
    assert await client.xlen(keys.score_jobs) == 0


async def test_score_jobs_that_nobody_takes_are_named_on_the_status_page(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    await put(client, keys, job("a:0"), job("a:1"))
    async with role_of(run_config(broker_config, keys, run_dir), "trainer", "t") as role:
        await role.status.beat()
        now = await inspect(client, keys, 1)
        assert [(lag.stream, lag.entries, lag.taken) for lag in now.lag][-1] == ("score:jobs", 2, 0)
        assert "no scorer is alive, and 2 score jobs wait" in waits(now)
        await serve(scorer(client, keys), 2)
        now = await inspect(client, keys, 1)
        assert "score:jobs" not in [lag.stream for lag in now.lag]


async def _none_left(jobs: ScoreJobs, client: Any, keys: Keys) -> bool:
    assert await jobs.take(8, 1) == []
    return await client.xlen(keys.score_jobs) == 0
