"""Deaths of workers: who is blamed, who runs alone, who becomes a dead letter, and who is cleared."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.jobs import Claim, Claimed, Credit, Finished, JobQueue, Piece
from pipeline.keys import ARQ_RUNNING, Keys
from pipeline.messages import DeadLetter, Progress, decode
from pipeline.status import snapshot
from pipeline.tokens import FloatArray, Runs, TokenArray
from tests.factories import decode_job, sequence_result

PLENTY = Credit(10_000, 10_000, 1)
MOST = 3


def worker(client: Redis, keys: Keys, name: str = "w") -> JobQueue:
    return JobQueue(client, keys, worker=name)


async def fill(queue: JobQueue, *names: str, n: int = 1) -> None:
    assert set(await queue.enqueue([decode_job(f"{queue.keys.run}:{name}", n=n) for name in names], PLENTY)) == {
        "enqueued"
    }


async def claimed(queue: JobQueue, capacity: int = 8, held: int = 0) -> Claimed:
    return await queue.claim(capacity, 30, MOST, held)


def names(claims: list[Claim]) -> list[str]:
    return [claim.job_id.rpartition(":")[2] for claim in claims]


async def run_out(client: Any, keys: Keys, *claims: Claim) -> None:
    """Time passes: the leases are over."""
    for place, claim in enumerate(claims, start=1):
        for key in (keys.jobs, keys.leases):
            await client.zadd(key, {claim.job_id: place})
        await client.delete(ARQ_RUNNING + claim.job_id)


async def die(client: Redis, keys: Keys, capacity: int = 8) -> list[str]:
    """A worker takes what it can get and is never heard of again; the names of what it had."""
    got = await claimed(worker(client, keys, "dead"), capacity)
    await run_out(client, keys, *got.claims)
    await client.delete(f"{keys.alone}:turn")  # its turn runs out like its leases
    return names(got.claims)


async def letters(client: Redis, keys: Keys) -> list[DeadLetter]:
    return [decode(DeadLetter, fields[b"d"]) for _, fields in await client.xrange(keys.dead)]


async def test_jobs_of_a_worker_that_died_twice_run_alone_one_at_a_time(client: Redis, keys: Keys) -> None:
    await fill(worker(client, keys), "a", "b", "c")
    assert await die(client, keys) == ["a", "b", "c"]
    assert await die(client, keys) == ["a", "b", "c"]
    one, other = worker(client, keys, "one"), worker(client, keys, "other")
    first, second = await claimed(one), await claimed(other)
    assert names(first.claims) == ["a"]
    assert first.claims[0].alone
    assert names(second.claims) == []  # the other one's turn
    assert await one.commit([Finished(first.claims[0], sequence_result(first.claims[0].job_id))]) == ["ok"]
    assert names((await claimed(one)).claims) == ["b"]


async def test_a_busy_worker_is_asked_to_finish_first(client: Redis, keys: Keys) -> None:
    queue = worker(client, keys)
    await fill(queue, "a")
    await die(client, keys)
    await fill(queue, "busy")
    assert names((await claimed(queue)).claims) == ["a", "busy"]
    assert await queue.release((await claimed_again(client, keys, "a")), blame="its engine failed") == 1
    got = await claimed(queue, held=1)
    assert (got.claims, got.must_drain) == ([], True)
    bystander = await claimed(worker(client, keys), held=1)
    assert not bystander.must_drain
    assert await queue.commit([Finished(_only(await claimed_again(client, keys, "busy")), _result(keys, "busy"))])
    assert names((await claimed(queue)).claims) == ["a"]


async def claimed_again(client: Redis, keys: Keys, name: str) -> list[Claim]:
    """What a worker would know of the job that it holds."""
    raw: Any = client
    attempt = int(await raw.hget(f"{keys.job_state}{keys.run}:{name}", "attempt"))
    return [Claim(job_id=f"{keys.run}:{name}", attempt=attempt, enqueued_at=0.0)]


def _only(claims: list[Claim]) -> Claim:
    [claim] = claims
    return claim


def _result(keys: Keys, name: str) -> Any:
    return sequence_result(f"{keys.run}:{name}")


async def test_only_deaths_over_a_job_that_ran_alone_make_it_a_dead_letter(client: Redis, keys: Keys) -> None:
    await fill(worker(client, keys), "poison", "neighbour", n=2)
    for _ in range(2):
        assert await die(client, keys) == ["poison", "neighbour"]
    deaths, done = 0, list[str]()
    while (await snapshot(client, keys)).queued_jobs:
        queue = worker(client, keys, "next")
        claims = (await claimed(queue)).claims
        assert len(claims) <= 1
        for claim in claims:
            assert claim.alone
            if names([claim]) == ["poison"]:
                deaths += 1
                await run_out(client, keys, claim)
            else:
                done += names([claim])
                whole = [Finished(claim, sequence_result(claim.job_id, index, 2)) for index in (0, 1)]
                assert await queue.commit(whole) == ["ok", "ok"]
        await client.delete(f"{keys.alone}:turn")
    assert (deaths, done) == (MOST, ["neighbour"])
    now = await snapshot(client, keys)
    assert (now.dead, now.enqueued) == (2, 4)
    found = await letters(client, keys)
    assert [(each.seq_id, each.reason) for each in found] == [
        (f"{keys.run}:poison:{index}", "worker_deaths") for index in (0, 1)
    ]
    assert len(await client.xrange(keys.results + "0")) == 4  # tombstones too, so that groups complete


async def test_a_late_worker_that_lives_takes_its_blame_back(client: Redis, keys: Keys) -> None:
    paused, other = worker(client, keys, "paused"), worker(client, keys, "other")
    await fill(paused, "a")
    for _ in range(6):
        claim = _only((await claimed(paused)).claims)
        await run_out(client, keys, claim)
        taken = _only((await claimed(other)).claims)
        keys_, args = paused.renewal(30, {claim.job_id: claim.attempt})
        lost = await paused._scripts.run("renew", keys_, args)
        assert [raw.decode() for raw in lost] == [claim.job_id]
        assert await other.release([taken]) == 1
    raw: Any = client
    assert await raw.hget(f"{keys.job_state}{keys.run}:a", "shared") == b"0"
    assert (await snapshot(client, keys)).dead == 0


@pytest.mark.parametrize("word", ["commit", "checkpoint", "release", "fail"])
async def test_any_late_word_of_a_live_worker_clears_it(client: Redis, keys: Keys, word: str) -> None:
    paused, other, third = (worker(client, keys, name) for name in ("paused", "other", "third"))
    await fill(paused, "a")
    claim = _only((await claimed(paused)).claims)
    await run_out(client, keys, claim)
    await run_out(client, keys, _only((await claimed(other)).claims))
    assert _only((await claimed(third)).claims).alone  # two deaths
    raw: Any = client
    state = f"{keys.job_state}{claim.job_id}"
    assert await raw.hget(state, "shared") == b"2"
    piece = Progress(offset=0, token_ids=TokenArray([1]), logprobs=FloatArray([0.0]), versions=Runs.of([0]))
    words: dict[str, Any] = {
        "commit": lambda: paused.commit([Finished(claim, _result(keys, "a"))]),
        "checkpoint": lambda: paused.checkpoint([Piece(claim, 0, piece)]),
        "release": lambda: paused.release([claim]),
        "fail": lambda: paused.fail(claim, "invalid_request", "late"),
    }
    await words[word]()
    assert await raw.hget(state, "shared") == b"1"
    await words[word]()
    assert await raw.hget(state, "shared") == b"1"


async def test_a_claim_whose_answer_was_lost_is_given_again(client: Redis, keys: Keys) -> None:
    queue = worker(client, keys)
    await fill(queue, "a", "b", "c", n=2)
    first = await claimed(queue, capacity=4)
    queue._num_claims -= 1  # what a retry of the client sends
    again = await claimed(queue, capacity=4)
    assert again.claims == first.claims
    assert names(again.claims) == ["a", "b"]
    assert names((await claimed(queue)).claims) == ["c"]


async def test_releases_and_own_lost_leases_blame_nobody(client: Redis, keys: Keys) -> None:
    queue = worker(client, keys)
    await fill(queue, "a")
    for _ in range(5):
        claim = _only((await claimed(queue)).claims)
        await run_out(client, keys, claim)
        claim = _only((await claimed(queue)).claims)
        assert await queue.release([claim]) == 1
    raw: Any = client
    assert await raw.hget(f"{keys.job_state}{keys.run}:a", "shared") is None


async def test_an_engine_failure_counts_like_a_death_and_leaves_its_trace(client: Redis, keys: Keys) -> None:
    queue = worker(client, keys, "broken")
    await fill(queue, "poison", "innocent")
    for _ in range(2):
        both = (await claimed(queue)).claims
        assert await queue.release(both, blame="the engine failed: NaN", traceback="Traceback …", most=MOST) == 2
    for _ in range(MOST):
        claim = _only((await claimed(queue)).claims)
        assert (names([claim]), claim.alone) == (["poison"], True)
        assert await queue.release([claim], blame="the engine failed: NaN", traceback="Traceback …", most=MOST) == 1
    [letter] = await letters(client, keys)
    assert (letter.reason, letter.worker, letter.traceback) == ("worker_deaths", "broken", "Traceback …")
    assert "NaN" in letter.detail
    assert names((await claimed(queue)).claims) == ["innocent"]


async def test_a_dead_process_is_reaped_at_once(client: Redis, keys: Keys) -> None:
    dead, other = worker(client, keys, "dead"), worker(client, keys, "other")
    await fill(dead, "a", "b")
    await claimed(dead)
    assert (await claimed(other)).claims == []
    assert await other.reap(dead.owner) == 2
    assert names((await claimed(other)).claims) == ["a", "b"]
    assert await other.reap(dead.owner) == 0
    assert (await snapshot(client, keys)).redelivered_jobs == 2


async def test_priority_survives_being_set_apart(client: Redis, keys: Keys) -> None:
    queue = worker(client, keys)
    await fill(queue, "a", "b")
    await asyncio.sleep(0)
    jobs = [decode_job(f"{keys.run}:urgent", priority=5)]
    assert await queue.enqueue(jobs, PLENTY) == ["enqueued"]
    for _ in range(2):
        await die(client, keys)
    assert names((await claimed(queue)).claims) == ["urgent"]
