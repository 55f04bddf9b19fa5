"""Dead letters against a real broker: what is sent back, what is thrown away, and that no byte or sequence is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from sluice.pipeline.broker.scripts.jobs import Replay
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.queue import Call, Claim, Credit, Finished, JobQueue, arq_payload
from sluice.pipeline.queue.dead_letters import NO_PAYLOAD, TAKEN_ELSEWHERE, DeadLetters, Row, Selection
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import ARQ_JOB, Keys
from sluice.pipeline.wire.messages import DecodeJob
from tests.factories import decode_job, sequence_result
from tests.roles import run_config

PLENTY = Credit(max_in_flight=10_000, samples_per_version=10_000, max_staleness=1)
ALL = Selection(everything=True)


class World:
    """A queue, its dead letters, and what they hold."""

    def __init__(self, client: Redis, config: Config) -> None:
        self.client: Any = client
        self.keys = Keys(config.run)
        self.queue = JobQueue(client, self.keys, worker="w")
        self.letters = DeadLetters(client, config)

    async def enqueue(self, name: str, n: int = 1, **changes: Any) -> DecodeJob:
        job = decode_job(f"{self.keys.run}:{name}", n=n, **changes)
        assert await self.queue.enqueue([job], PLENTY) == ["enqueued"]
        return job

    async def enqueue_raw(self, name: str, payload: bytes) -> str:
        """As a foreign program does."""
        job_id = f"{self.keys.run}:{name}"
        await self.client.set(ARQ_JOB + job_id, payload)
        await self.client.zadd(self.keys.jobs, {job_id: 1})
        return job_id

    async def claim(self) -> list[Claim]:
        return (await self.queue.claim(64, 30, 3)).claims

    async def kill(self, reason: str = "invalid_request") -> None:
        """Everything that is ready dies."""
        for claim in await self.claim():
            await self.queue.fail(claim, claim.reason or reason, "because", "Traceback: line 1")

    async def dead(self, name: str = "a", n: int = 1, reason: str = "invalid_request", **changes: Any) -> DecodeJob:
        job = await self.enqueue(name, n, **changes)
        await self.kill(reason)
        return job

    async def burial(self) -> list[Row]:
        """The only one."""
        [rows] = [rows async for rows in self.letters.burials()]
        return rows

    async def rows(self) -> list[tuple[str, bool]]:
        """Sequence ids in order, and whether the payload is there."""
        return [(row.letter.seq_id, bool(row.payload)) async for row in self.letters.rows()]

    async def counted(self, name: str) -> int:
        return int(await self.client.hget(self.keys.counts, name) or 0)

    async def held(self) -> int:
        """Bytes that lie in the broker for unfinished sequences and dead letters."""
        streams = [self.keys.dead, f"{self.keys.results}0"]
        entries = [entry for stream in streams for _, entry in await self.client.xrange(stream)]
        total = sum(len(entry.get(field, b"")) for entry in entries for field in (b"d", b"p", b"r"))
        for job_id in await self.client.zrange(self.keys.jobs, 0, -1):
            total += await self.client.strlen(ARQ_JOB.encode() + job_id)
        return total

    async def check(self) -> None:
        """What is counted is what is there."""
        now = await snapshot(self.client, self.keys)
        assert await self.counted("bytes") == await self.held()
        claims = await self.client.zcard(self.keys.jobs)
        assert (now.enqueued == now.ended) == (claims == 0)


@pytest.fixture
def w(client: Redis, broker_config: BrokerConfig, keys: Keys, run_dir: Path) -> World:
    return World(client, run_config(broker_config, keys, run_dir))


async def test_a_replay_is_a_new_job_of_the_dead_indices(w: World) -> None:
    job = await w.enqueue("a", n=3, truth={"x": 1}, priority=7, deadline_s=60.0)
    [claim] = await w.claim()
    assert await w.queue.commit([Finished(claim, sequence_result(job.job_id, 1, 3))]) == ["ok"]
    await w.queue.fail(claim, "invalid_request", "because")
    assert await w.rows() == [(f"{job.job_id}:0", True), (f"{job.job_id}:2", False)]
    [done] = await w.letters.replay(ALL)
    assert (done.sequences, done.new_job_id) == ([f"{job.job_id}:0", f"{job.job_id}:2"], f"{job.job_id}~r1")
    assert await w.rows() == []
    await w.check()
    [again] = await w.claim()
    assert again.job is not None
    assert again.job.job_id == again.job_id == done.new_job_id
    assert (again.job.n, again.job.truth, again.job.priority, again.attempt) == (2, {"x": 1}, 7, 1)
    assert again.deadline_at is not None
    assert (await w.counted("enqueued"), await w.counted("dead")) == (5, 2)
    results = [sequence_result(again.job_id, index, 2) for index in (0, 1)]
    assert await w.queue.commit([Finished(again, result) for result in results]) == ["ok", "ok"]
    assert await w.client.zcard(w.keys.jobs) == 0
    assert await w.counted("bytes") == await w.held()


async def test_the_payload_stays_with_the_rows_that_stay(w: World) -> None:
    job = await w.dead("a", n=4)
    other = await w.dead("b")
    a, b = job.job_id, other.job_id
    [done] = await w.letters.replay(Selection(seq_ids=frozenset({f"{a}:0", f"{a}:2"})))
    assert done.new_job_id == f"{a}~r1"
    assert await w.rows() == [(f"{b}:0", True), (f"{a}:1", True), (f"{a}:3", False)]
    await w.check()
    [dropped] = await w.letters.drop(Selection(seq_ids=frozenset({f"{a}:3"})))
    assert (dropped.sequences, dropped.new_job_id) == ([f"{a}:3"], None)
    assert await w.rows() == [(f"{b}:0", True), (f"{a}:1", True)]
    await w.letters.drop(Selection(seq_ids=frozenset({f"{b}:0"})))
    [last] = await w.letters.replay(Selection(job=a))
    await w.check()
    claims = {claim.job_id: claim.job for claim in await w.claim()}
    assert {job_id: made.n for job_id, made in claims.items() if made} == {f"{a}~r1": 2, last.new_job_id: 1}
    assert await w.rows() == []


async def test_a_replay_that_dies_again_can_be_replayed_again(w: World) -> None:
    job = await w.dead("a", n=2)
    names: list[str | None] = []
    for _ in range(3):
        [done] = await w.letters.replay(ALL)
        names.append(done.new_job_id)
        await w.kill("worker_deaths")
        await w.check()
    assert names == [f"{job.job_id}~r{number}" for number in (1, 2, 3)]
    assert [name for name, _ in await w.rows()] == [f"{names[-1]}:0", f"{names[-1]}:1"]
    assert (await w.counted("enqueued"), await w.counted("dead"), await w.counted("replayed")) == (8, 8, 6)


async def test_only_the_selected_reason_goes(w: World) -> None:
    await w.dead("a", n=2, reason="expired")
    await w.dead("b", reason="worker_deaths")
    await w.dead("c", reason="expired")
    assert await w.letters.replay(Selection(reason="nonsense")) == []
    done = await w.letters.replay(Selection(reason="expired"))
    assert [each.job_id.rpartition(":")[2] for each in done] == ["a", "c"]
    assert [name for name, _ in await w.rows()] == [f"{w.keys.run}:b:0"]
    await w.check()


async def test_what_cannot_be_read_goes_back_whole_and_as_it_is(w: World) -> None:
    newer_job = await w.enqueue("newer", n=3)
    newer, junk = newer_schema(arq_payload(newer_job)), b"\x80\x04junk"
    await w.client.set(ARQ_JOB + newer_job.job_id, newer)
    newer_id, junk_id = newer_job.job_id, await w.enqueue_raw("junk", junk)
    await w.kill()
    reasons = Counter([row.letter.reason async for row in w.letters.rows()])
    assert reasons == {"unknown_schema": 3, "malformed_envelope": 1}
    done = await w.letters.replay(Selection(seq_ids=frozenset({f"{newer_id}:1", f"{junk_id}:0"})))
    assert sorted(len(each.sequences) for each in done) == [1, 3], "all three of the one that cannot be read"
    await w.check()
    stored = {each.job_id: await w.client.get(f"{ARQ_JOB}{each.new_job_id}") for each in done}
    assert stored == {newer_id: newer, junk_id: junk}
    await w.kill()
    assert Counter([row.letter.reason async for row in w.letters.rows()]) == reasons
    await w.check()


def newer_schema(payload: bytes) -> bytes:
    changed = payload.replace(b"\xa6schema\x01", b"\xa6schema\x09")
    assert changed != payload
    return changed


async def test_a_foreign_job_of_many_that_can_be_read_by_now_is_counted_whole(w: World) -> None:
    """An older release buried it as one sequence."""
    payload = arq_payload(decode_job(f"{w.keys.run}:f", n=3))
    await w.enqueue_raw("f", newer_schema(payload))
    await w.kill()
    [done] = await w.letters.replay(ALL)
    await w.client.set(f"{ARQ_JOB}{done.new_job_id}", payload)  # to this release it is one that it can read
    [claim] = await w.claim()
    assert claim.job is not None
    assert (claim.job.n, await w.counted("enqueued")) == (3, 4)
    results = [sequence_result(claim.job_id, index, 3) for index in range(3)]
    assert await w.queue.commit([Finished(claim, result) for result in results]) == ["ok"] * 3


async def test_a_plain_call_goes_back_as_a_call(w: World) -> None:
    await w.queue.enqueue_calls([Call(job_id=f"{w.keys.run}:call", function="fn", args=(1,), kwargs={"k": 2})])
    await w.kill("failed")
    [done] = await w.letters.replay(ALL)
    [claim] = await w.claim()
    assert (claim.job_id, claim.function, list(claim.args), claim.kwargs) == (done.new_job_id, "fn", [1], {"k": 2})
    await w.queue.fail(claim, "failed", "again")
    assert await w.client.xlen(f"{w.keys.results}0") == 0, "a call has no group to complete"


async def test_two_at_once_replay_each_row_once(w: World) -> None:
    for name in range(20):
        await w.enqueue(f"j{name}", n=2)
    await w.kill()
    both = await asyncio.gather(w.letters.replay(ALL), w.letters.replay(ALL))
    good = [name for done in both for each in done if not each.problem for name in each.sequences]
    assert len(good) == len(set(good)) == 40
    assert {each.problem for done in both for each in done} <= {None, TAKEN_ELSEWHERE}
    assert await w.client.zcard(w.keys.jobs) == 20
    await w.check()


async def test_a_row_that_moved_meanwhile_is_found_again(w: World) -> None:
    job = await w.dead("a", n=3)
    burial = await w.burial()
    first = Selection(seq_ids=frozenset({f"{job.job_id}:0"}))
    rest = Selection(seq_ids=frozenset({f"{job.job_id}:1", f"{job.job_id}:2"}))
    moved = False

    async def act(rows: list[Any], chosen: list[Any]) -> Any:
        nonlocal moved
        if not moved:
            moved = True
            await w.letters.drop(first)
        return await w.letters._drop(rows, chosen)

    done = await w.letters._each(rest, act)
    assert [each.sequences for each in done] == [[row.letter.seq_id for row in burial[1:]]]
    assert await w.rows() == []
    await w.check()


async def test_the_same_call_twice_replays_once(w: World) -> None:
    """A lost answer makes the client repeat itself."""
    job = await w.dead("a", n=2)
    rows = await w.burial()
    new_id = f"{job.job_id}~r9"
    request = Replay(
        id=new_id.encode(),
        payload=arq_payload(decode_job(new_id, n=2)),
        n=2,
        priority=0,
        deadline_ms=0,
        call="",
        mailbox="",
        leaving=[row.entry_id for row in rows],
        staying=[],
    )
    answers = [await w.letters._scripts.ask(w.letters._queue.names, request) for _ in range(2)]
    assert answers == ["ok", "ok"]
    assert await w.counted("enqueued") == 4
    await w.check()
    await w.kill()
    rows = await w.burial()
    request = msgspec.structs.replace(request, leaving=[row.entry_id for row in rows])
    assert await w.letters._scripts.ask(w.letters._queue.names, request) == "taken"
    assert len(await w.rows()) == 2


async def test_without_a_payload_it_can_only_be_dropped(w: World) -> None:
    job = await w.enqueue("a", n=2)
    await w.client.delete(ARQ_JOB + job.job_id)
    assert await w.claim() == []
    [done] = await w.letters.replay(ALL)
    assert (done.problem, done.new_job_id, len(done.sequences)) == (NO_PAYLOAD, None, 2)
    [done] = await w.letters.drop(ALL)
    assert (done.problem, len(done.sequences)) == (None, 2)
    assert await w.rows() == []
    await w.check()


async def test_a_row_that_cannot_be_read_is_listed_and_dropped(w: World) -> None:
    await w.client.xadd(w.keys.dead, {"d": b"\xc1", "g": f"{w.keys.run}:x", "i": 4, "n": 5, "p": b""})
    await w.client.hincrby(w.keys.counts, "bytes", 1)
    [row] = [row async for row in w.letters.rows()]
    assert (row.letter.reason, row.letter.seq_id) == ("unreadable_letter", f"{w.keys.run}:x:4")
    await w.letters.drop(Selection(reason="unreadable_letter"))
    assert (await w.rows(), await w.counted("bytes")) == ([], 0)


async def test_many_rows_are_read_page_by_page_and_found(w: World) -> None:
    job = await w.dead("a", n=230)
    assert [name for name, _ in await w.rows()] == [f"{job.job_id}:{index}" for index in range(230)]
    found = await w.letters.find(f"{job.job_id}:229")
    assert found is not None
    assert (found[0].index, found[0].n, bool(found[1])) == (229, 230, True)
    assert await w.letters.find(f"{job.job_id}:230") is None
    assert await w.letters.find(found[0].letter.seq_id, entry_id=found[0].entry_id) == found
    assert await w.letters.find(found[0].letter.seq_id, entry_id="1-1") == found, "it was moved: search"
    [done] = await w.letters.replay(ALL)
    assert len(done.sequences) == 230
