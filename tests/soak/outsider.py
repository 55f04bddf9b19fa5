"""A foreign program that puts its own entries into a run's queue and streams, well-formed ones and hostile ones.

Each way in says how its sequences must end: `TRAINED`, or the reason of the dead letter.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import redis
from arq import create_pool
from arq.connections import ArqRedis

from sluice.pipeline.queue import arq_redis_settings, arq_serializer
from sluice.pipeline.wire.keys import ARQ_JOB
from sluice.pipeline.wire.messages import DecodeJob, ImageRef, SamplingParams, encode
from tests.deadlines import HANG_S
from tests.e2e.stack import Stack
from tests.soak.spinning import asks_to_spin

TRAINED = "trained"
Ends = dict[str, str]
_TRUTH = [{"desc": "seven", "bbox_2d": [1, 2, 500, 900]}]


class Bomb:
    """Whoever unpickles it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.mkdir, (self.path,)


class Outsider:
    """`ends` is what it has brought: sequence id → how it must end."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.ends: Ends = {}
        self.poison: set[str] = set()
        self.crater = stack.directory / "a-pickle-was-loaded"

    def bring_poison(self, number: int) -> str:
        """A job that hangs its worker, and beside it one that must not suffer for it."""
        job_id = f"{self._stack.run}:poison-{number}"
        self.poison.add(job_id)
        good = self._job(f"neighbour-{number}")
        self._enqueue("decode", encode(self._job(f"poison-{number}", messages=asks_to_spin())), job_id=job_id)
        self._enqueue("decode", encode(good), job_id=good.job_id)
        self._settle()
        self.ends |= {f"{job_id}:0": "worker_deaths", f"{good.job_id}:0": TRAINED}
        return job_id

    def bring_malformed(self, number: int, seed: int) -> str:
        """One entry of every malformed sort, in a drawn order."""
        dice = random.Random(seed)
        ways = dice.sample(WAYS, len(WAYS))
        for way in ways:
            self.ends |= way(self, f"{self._stack.run}:{way.__name__}-{number}", dice)
        self._settle()
        return ", ".join(way.__name__ for way in ways)

    def bring_junk(self, seed: int) -> str:
        """Entries in the result streams that no worker wrote; they are nobody's sequences."""
        dice = random.Random(seed)
        stray = {b"g": b"nobody:1", b"i": b"0", b"n": b"1", b"r": dice.randbytes(20)}
        for fields in ({b"x": dice.randbytes(20)}, {**stray, b"i": b"first"}, stray):
            stream = f"{self._stack.keys.results}{dice.randrange(self._stack.config.consumer.count)}"
            self._surely(lambda client, entry=fields, name=stream: client.xadd(name, entry))
        self._settle()
        return "3 entries"

    def hostile_bytes(self, job_id: str, dice: random.Random) -> Ends:
        """A payload of random bytes."""
        self._lay(job_id, b"\xc1" + dice.randbytes(dice.randint(0, 400)))  # 0xc1 begins no msgpack value
        return {f"{job_id}:0": "malformed_envelope"}

    def id_that_is_no_text(self, job_id: str, dice: random.Random) -> Ends:
        """An id that is no UTF-8."""
        self._lay(job_id + "\udcff", dice.randbytes(40))
        return {f"{job_id}\\xff:0": "malformed_id"}

    def no_payload(self, job_id: str, dice: random.Random) -> Ends:
        """An id in the queue with nothing behind it."""
        self._lay(job_id, None)
        return {f"{job_id}:0": "expired"}

    def pickled_envelope(self, job_id: str, dice: random.Random) -> Ends:
        """arq's default serialiser; loading it leaves a trace."""
        self._enqueue("decode", Bomb(self.crater), serializer=None, job_id=job_id)
        return {f"{job_id}:0": "malformed_envelope"}

    def unknown_function(self, job_id: str, dice: random.Random) -> Ends:
        """A function that no worker has."""
        self._enqueue("encode", 1, job_id=job_id)
        return {f"{job_id}:0": "unknown_function"}

    def wrong_arguments(self, job_id: str, dice: random.Random) -> Ends:
        """The right function, called wrongly."""
        self._enqueue("decode", 1, "two", [3], job_id=job_id)
        return {f"{job_id}:0": "malformed_arguments"}

    def garbage_job(self, job_id: str, dice: random.Random) -> Ends:
        """The right function with bytes that are no job."""
        self._enqueue("decode", b"\xc1" + dice.randbytes(40), job_id=job_id)
        return {f"{job_id}:0": "malformed_payload"}

    def newer_schema(self, job_id: str, dice: random.Random) -> Ends:
        """A job of a later release."""
        job = msgspec.structs.replace(self._job("newer"), schema=dice.randint(100, 1000))
        self._enqueue("decode", encode(job), job_id=job_id)
        return {f"{job_id}:0": "unknown_schema"}

    def image_for_a_text_model(self, job_id: str, dice: random.Random) -> Ends:
        """A well-formed job that this model cannot do."""
        job = self._job("image", images=[ImageRef(url="https://example.org/a.png")])
        self._enqueue("decode", encode(job), job_id=job_id)
        return {f"{job_id}:0": "invalid_request"}

    def _job(self, name: str, **fields: Any) -> DecodeJob:
        messages = [{"role": "user", "content": name}]
        sampling = SamplingParams(max_new_tokens=8)
        base: dict[str, Any] = {"run": self._stack.run, "job_id": f"{self._stack.run}:{name}", "truth": _TRUTH}
        return DecodeJob(**{**base, "messages": messages, "sampling": sampling, **fields})

    def _lay(self, job_id: str, payload: bytes | None) -> None:
        raw = job_id.encode(errors="surrogateescape")

        def lay(client: Any) -> None:
            if payload is not None:
                client.set(ARQ_JOB.encode() + raw, payload, ex=3600)
            client.zadd(self._stack.keys.jobs, {raw: int(time.time() * 1000)})

        self._surely(lay)

    def _enqueue(self, function: str, *arguments: Any, job_id: str, serializer: Any = arq_serializer) -> None:
        async def send() -> None:
            assert self._stack.broker_url
            pool: ArqRedis = await create_pool(
                arq_redis_settings(self._stack.broker_url),
                job_serializer=serializer,
                default_queue_name=self._stack.keys.jobs,
            )
            try:
                await pool.enqueue_job(function, *arguments, _job_id=job_id)
            finally:
                await pool.aclose()

        self._surely(lambda _: asyncio.run(send()))

    def _settle(self) -> None:
        """Until the broker has it on disk: the next fault may be its death, and nobody brings these entries again."""
        self._surely(lambda client: client.execute_command("WAITAOF", 1, 0, 5000))

    def _surely(self, act: Callable[[Any], Any]) -> None:
        """Again until the broker has taken it."""
        until = time.monotonic() + HANG_S
        while True:
            try:
                with self._stack.client() as client:
                    act(client)
                return
            except (redis.RedisError, OSError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


WAYS: list[Callable[[Outsider, str, random.Random], Ends]] = [
    Outsider.hostile_bytes,
    Outsider.id_that_is_no_text,
    Outsider.no_payload,
    Outsider.pickled_envelope,
    Outsider.unknown_function,
    Outsider.wrong_arguments,
    Outsider.garbage_job,
    Outsider.newer_schema,
    Outsider.image_for_a_text_model,
]
