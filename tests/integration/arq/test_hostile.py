"""Payloads that no honest program sends, between jobs that must not suffer."""

from __future__ import annotations

import builtins
import random
from typing import Any

import msgspec
import pytest
from arq.connections import ArqRedis
from arq.worker import func
from redis.asyncio import Redis

from sluice.pipeline.queue import arq_serializer
from sluice.pipeline.wire.keys import ARQ_JOB, ARQ_RESULT, Keys
from sluice.pipeline.wire.messages import DeadLetter, decode
from tests.integration.arq.conftest import MakeWorker
from tests.integration.arq.serving import answer, burst, counts, letters, tally

SAID = [{"role": "user", "content": "hello"}]
NESTED = b"\x91" * 100_000 + b"\xc0"


def envelope(**changes: Any) -> bytes:
    """arq's envelope with fields of one's own."""
    return arq_serializer({"t": None, "f": "nothing", "a": [], "k": {}, "et": 1, **changes})


def nested_in(field: str) -> bytes:
    """An envelope that is fine but for one field, which is nested 100,000 levels deep."""
    fields = {"t": None, "f": "nothing", "a": [], "k": {}, "et": 1}
    parts = [msgspec.msgpack.encode(name) + (NESTED if name == field else arq_serializer(value))  # type: ignore[arg-type]
             for name, value in fields.items()]  # fmt: skip
    return bytes([0x80 + len(fields)]) + b"".join(parts)


# Made with protocol 0: to read it would call exec, and that would be noticed.
BOMB = b"cbuiltins\nexec\n(Vimport builtins; builtins.sluice_was_unpickled = True\ntR."


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "malformed_envelope"),
    "random": (random.Random(5).randbytes(300), "malformed_envelope"),
    "text": (b"hello", "malformed_envelope"),
    "pickle": (BOMB, "malformed_envelope"),
    "deep": (NESTED, "malformed_envelope"),
    "deep-args": (nested_in("a"), "malformed_envelope"),
    "deep-kwargs": (nested_in("k"), "malformed_envelope"),
    "deep-name": (nested_in("f"), "malformed_envelope"),
    "cut": (envelope()[:-3], "malformed_envelope"),
    "trailing": (envelope() + b"\x01", "malformed_envelope"),
    "list": (arq_serializer([1, 2, 3]), "malformed_envelope"),  # type: ignore[arg-type]
    "number": (arq_serializer(7), "malformed_envelope"),  # type: ignore[arg-type]
    "null": (arq_serializer(None), "malformed_envelope"),  # type: ignore[arg-type]
    "empty-map": (arq_serializer({}), "malformed_envelope"),
    "no-function": (arq_serializer({"t": None, "a": [], "k": {}, "et": 1}), "malformed_envelope"),
    "function-is-a-list": (envelope(f=["nothing"]), "malformed_envelope"),
    "args-are-text": (envelope(a="nothing"), "malformed_envelope"),
    "args-are-a-number": (envelope(a=7), "malformed_envelope"),
    "kwargs-are-a-list": (envelope(k=[1]), "malformed_envelope"),
    "kwargs-are-null": (envelope(k=None), "malformed_envelope"),
    "keyword-is-a-number": (envelope(k={1: 2}), "failed"),
    "keyword-is-bytes": (envelope(k={b"x": 2}), "failed"),
    "argument-too-many": (envelope(a=[1]), "failed"),
    "time-is-text": (envelope(et="yesterday"), ""),
    "time-is-huge": (envelope(et=2**63), ""),
    "try-is-text": (envelope(t="first"), ""),
    "try-is-huge": (envelope(t=2**62), ""),
    "long-name": (envelope(f="x" * 100_000), "unknown_function"),
    "name-with-nul": (envelope(f="noth\x00ing"), "unknown_function"),
    "private-name": (envelope(f="__class__"), "unknown_function"),
    "decode-nothing": (envelope(f="decode"), "malformed_arguments"),
    "decode-junk": (envelope(f="decode", a=[b"\xff\xff"]), "malformed_payload"),
    "decode-text": (envelope(f="decode", a=["hello"]), "malformed_arguments"),
    "decode-deep": (envelope(f="decode", a=[NESTED]), "malformed_payload"),
    "decode-two": (envelope(f="decode", a=[{}, {}]), "malformed_arguments"),
    "decode-empty": (envelope(f="decode", a=[{}]), "malformed_payload"),
    "decode-wrong-types": (envelope(f="decode", k={"n": "many", "messages": 7}), "malformed_payload"),
    "decode-misspelt": (envelope(f="decode", k={"num": 8, "messages": SAID}), "malformed_payload"),
    "decode-misspelt-map": (envelope(f="decode", a=[{"samping": {}, "messages": SAID}]), "malformed_payload"),
    "decode-another-kind": (envelope(f="decode", a=[{"kind": "score_job", "messages": SAID}]), "malformed_payload"),
    "decode-n-below": (envelope(f="decode", k={"n": -5, "messages": SAID}), "malformed_payload"),
    "decode-n-nan": (envelope(f="decode", k={"n": float("nan"), "messages": SAID}), "malformed_payload"),
    "decode-n-inf": (envelope(f="decode", k={"n": float("inf"), "messages": SAID}), "malformed_payload"),
    "decode-deadline-nan": (
        envelope(f="decode", k={"deadline_s": float("nan"), "messages": SAID}),
        "malformed_payload",
    ),
}


async def nothing(ctx: dict[Any, Any]) -> str:
    return "done"


async def put(client: Redis, keys: Keys, name: str, payload: bytes, score: float = 1) -> None:
    await client.set(f"{ARQ_JOB}{keys.run}:{name}", payload)
    await client.zadd(keys.jobs, {f"{keys.run}:{name}": score})


@pytest.mark.parametrize("name", BAD)
async def test_each_bad_job_is_a_dead_letter_and_the_good_ones_are_done(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis, name: str
) -> None:
    payload, reason = BAD[name]
    before = await foreign.enqueue_job("nothing", _defer_by=-10)
    await put(client, keys, name, payload)
    after = await foreign.enqueue_job("nothing")
    worker = make_worker(func(nothing, name="nothing"))
    await burst(worker)
    assert [await answer(before), await answer(after)] == ["done", "done"]
    found = await letters(client, keys)
    if reason:
        assert {job_id: letter.reason for job_id, letter in found.items()} == {f"{keys.run}:{name}": reason}
        assert found[f"{keys.run}:{name}"].detail
        assert tally(worker) == (2, 1, 0)
        [(_, row)] = await client.xrange(keys.dead)
        assert row[b"p"] == payload, "the payload is kept as it was"
    else:
        assert worker.arq.jobs_complete >= 2
    books = await counts(client, keys)
    assert books["called"] + books.get("dead", 0) == 3
    assert books.get("enqueued", 0) == books.get("dead", 0), "a call that is done is off the books"
    assert await foreign.zcard(keys.jobs) == 0
    await client.delete(f"{ARQ_RESULT}{keys.run}:{name}")


async def test_all_of_them_at_once(foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis) -> None:
    good = []
    for name, (payload, _) in BAD.items():
        await put(client, keys, name, payload)
        good.append(await foreign.enqueue_job("nothing", _defer_by=-10))
    worker = make_worker(func(nothing, name="nothing"))
    await burst(worker)
    assert [await answer(job) for job in good] == ["done"] * len(good)
    reasons = {job_id.partition(":")[2]: letter.reason for job_id, letter in (await letters(client, keys)).items()}
    assert reasons.items() >= {name: reason for name, (_, reason) in BAD.items() if reason}.items()
    assert not hasattr(builtins, "sluice_was_unpickled")


@pytest.mark.parametrize("n", [65_537, 10**6, 2**62, 1e300])
async def test_a_huge_n_does_not_make_huge_books(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis, n: float
) -> None:
    """One malformed job must not fill the dead letters: it is refused as one sequence."""
    await put(client, keys, "huge", envelope(f="decode", k={"n": n, "messages": []}))
    good = await foreign.enqueue_job("nothing")
    await burst(make_worker(func(nothing, name="nothing")))
    assert await answer(good) == "done"
    assert 1 <= await client.xlen(keys.dead) <= 1024
    assert [letter.reason for letter in (await letters(client, keys)).values()] == ["malformed_payload"]


@pytest.mark.parametrize("suffix", [b"\xff\xfe", b"a\x00b", b"a\r\nb", b" ", "ü".encode(), b"x" * 10_000])
async def test_any_bytes_may_be_an_id(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis, suffix: bytes
) -> None:
    """The job ends, one way or the other, and its row can be read."""
    job_id = f"{keys.run}:".encode() + suffix
    await client.set(ARQ_JOB.encode() + job_id, envelope(f="missing"))
    await client.zadd(keys.jobs, {job_id: 1})
    good = await foreign.enqueue_job("nothing")
    await burst(make_worker(func(nothing, name="nothing"), settings={"lease_s": 600.0}))
    assert await answer(good) == "done"
    [(_, row)] = await client.xrange(keys.dead)
    assert decode(DeadLetter, row[b"d"]).reason
    assert row[b"g"].decode()
    await client.delete(ARQ_RESULT.encode() + job_id)


@pytest.mark.parametrize("kind", ["hash", "list"])
async def test_a_payload_key_of_another_type_harms_nobody(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Any, kind: str
) -> None:
    name = f"{ARQ_JOB}{keys.run}:odd"
    await (client.hset(name, "f", "nothing") if kind == "hash" else client.rpush(name, "nothing"))
    await client.zadd(keys.jobs, {f"{keys.run}:odd": 1})
    good = await foreign.enqueue_job("nothing")
    await burst(make_worker(func(nothing, name="nothing")))
    assert await answer(good) == "done"
    assert list(await letters(client, keys)) == [f"{keys.run}:odd"]


@pytest.mark.parametrize("score", [float("-inf"), -1e300, 0])
async def test_odd_scores_are_places_in_the_line(
    foreign: ArqRedis, make_worker: MakeWorker, keys: Keys, client: Redis, score: float
) -> None:
    await put(client, keys, "odd", envelope(), score)
    good = await foreign.enqueue_job("nothing")
    worker = make_worker(func(nothing, name="nothing"))
    await burst(worker)
    assert await answer(good) == "done"
    assert tally(worker) == (2, 0, 0)
