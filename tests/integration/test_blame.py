"""Deaths of workers: who is blamed, who runs alone, who becomes a dead letter, and who is cleared."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from sluice.pipeline.queue import Claim, Claimed, Credit, Finished, JobQueue, Piece
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import ARQ_RUNNING, Keys
from sluice.pipeline.wire.messages import DeadLetter, Progress, decode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
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
    await client.delete(f"{keys.alone}:turns")  # its turn runs out like its leases
    return names(got.claims)


async def letters(client: Redis, keys: Keys) -> list[DeadLetter]:
    return [decode(DeadLetter, fields[b"d"]) for _, fields in await client.xrange(keys.dead)]


async def test_jobs_of_workers_that_died_twice_run_alone_one_on_each_worker(client: Redis, keys: Keys) -> None:
    await fill(worker(client, keys), "a", "b", "c")
    assert await die(client, keys) == ["a", "b", "c"]
    assert await die(client, keys) == ["a", "b", "c"]
    one, other = worker(client, keys, "one"), worker(client, keys, "other")
    first, second = await claimed(one), await claimed(other)
    assert names(first.claims) == ["a"]
    assert first.claims[0].alone
    assert names(second.claims) == ["b"]
    assert await one.commit([Finished(first.claims[0], sequence_result(first.claims[0].job_id))]) == ["ok"]
    assert names((await claimed(one)).claims) == ["c"]


async def test_a_poison_job_among_many_is_found_by_halving_and_takes_nobody_along(client: Redis, keys: Keys) -> None:
    queue = worker(client, keys)
    every = [f"j{number:02}" for number in range(32)]
    await fill(queue, *every)
    deaths, done = 0, list[str]()
    while (await snapshot(client, keys)).queued_jobs:
        for each in (worker(client, keys), worker(client, keys)):
            claims = (await claimed(each, 32)).claims
            if "j13" in names(claims):
                deaths += 1
                await each.reap(each.owner, MOST)
            elif claims:
                done += names(claims)
                assert set(await each.commit([Finished(one, sequence_result(one.job_id)) for one in claims])) == {"ok"}
    assert deaths == 2 + 4 + MOST
    assert sorted([*done, "j13"]) == every
    assert [letter.seq_id for letter in await letters(client, keys)] == [f"{keys.run}:j13:0"]


async def test_suspects_run_side_by_side_on_every_worker(client: Redis, keys: Keys) -> None:
    every = [f"j{number:02}" for number in range(32)]
    await fill(worker(client, keys), *every)
    for _ in range(2):
        await die(client, keys, 32)
    got = [names((await claimed(worker(client, keys), 32)).claims) for _ in range(3)]
    assert got == [every[:16], every[16:], []]


async def test_who_got_on_before_the_death_is_no_suspect(client: Redis, keys: Keys) -> None:
    await fill(worker(client, keys), "moves", "commits", "stands", n=2)
    piece = Progress(offset=0, token_ids=TokenArray([1]), logprobs=FloatArray([0.0]), versions=Runs.of([0]))
    for _ in range(2):
        dying = worker(client, keys, "dying")
        moves, commits, _ = (await claimed(dying)).claims
        start = len(moves.progress[0].token_ids) if moves.progress else 0
        assert await dying.checkpoint([Piece(moves, 0, replace(piece, offset=start))]) == ["ok"]
        index = len(commits.committed)
        if index == 0:
            assert await dying.commit([Finished(commits, sequence_result(commits.job_id, 0, 2))]) == ["ok"]
        await worker(client, keys).reap(dying.owner, MOST)
    got = (await claimed(worker(client, keys))).claims
    assert (names(got), got[0].alone) == (["stands"], True)
    assert names((await claimed(worker(client, keys))).claims) == ["moves", "commits"]


async def test_what_is_decoded_anew_is_no_progress(client: Redis, keys: Keys) -> None:
    await fill(worker(client, keys), "a")
    raw: Any = client

    async def dies_after(*sizes: int) -> bytes | None:
        dying = worker(client, keys, "dying")
        claim, offset = _only((await claimed(dying)).claims), 0
        for size in sizes:
            piece = Progress(
                offset=offset, token_ids=TokenArray([1] * size), logprobs=FloatArray([0.0] * size),
                versions=Runs.of([0] * size),
            )  # fmt: skip
            assert await dying.checkpoint([Piece(claim, 0, piece)]) == ["ok"]
            offset += size
        await worker(client, keys).reap(dying.owner, MOST)
        return await raw.hget(f"{keys.job_state}{claim.job_id}", "shared")

    assert await dies_after(4, 4) is None
    assert await dies_after(4, 3) == b"1"
    assert await dies_after(4, 4) == b"2"
    assert await dies_after(4, 4, 1) is None


@pytest.mark.parametrize("told", ["sigterm, its lease ran out", "sigterm, reaped", "killed by its supervisor"])
async def test_a_worker_that_was_ended_from_outside_blames_nobody(client: Redis, keys: Keys, told: str) -> None:
    await fill(worker(client, keys), "a", "b")
    for _ in range(5):
        ended = worker(client, keys, "ended")
        held = (await claimed(ended)).claims
        assert names(held) == ["a", "b"]
        if told.startswith("sigterm"):
            await ended.stand_down(60)
        if "reaped" in told:
            assert await worker(client, keys).reap(ended.owner, MOST) == 2
        elif "lease" in told:
            await run_out(client, keys, *held)
        else:
            assert await worker(client, keys).reap(ended.owner, MOST, killed=True) == 2
    raw: Any = client
    assert await raw.hget(f"{keys.job_state}{keys.run}:a", "shared") is None
    assert (await snapshot(client, keys)).redelivered_jobs == (8 if "lease" in told else 10)


async def test_no_more_workers_empty_themselves_than_suspects_need(client: Redis, keys: Keys) -> None:
    await fill(worker(client, keys), "a", "b")
    for _ in range(2):
        await die(client, keys)
    await fill(worker(client, keys), *"cdef")
    busy = [worker(client, keys, name) for name in "xyz"]
    answers = [await claimed(each, held=1) for each in busy]
    assert [each.must_drain for each in answers] == [True, True, False]  # two suspects, each alone
    assert names(answers[2].claims) == ["c", "d", "e", "f"]
    assert await client.pttl(f"{keys.alone}:turns") > 0, "workers that all die would leave it behind"
    await busy[0].stand_down(60)
    assert (await claimed(busy[2], held=1)).must_drain


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
        await client.delete(f"{keys.alone}:turns")
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
        assert await paused.renew(30, {claim.job_id: claim.attempt}) == [claim.job_id]
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
