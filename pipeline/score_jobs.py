"""Score jobs on the scorer's side: taken under a lease, answered once; see scores.py for the whole way.

- A job is held by one scorer at a time. One that is silent for `lease_s` loses it to another; a second answer to the
  same job changes nothing.
- A job that nobody waits for any more is discarded. One that cannot be read, or whose scorers died over it, is answered
  with an error, so that nothing is given out for ever.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pipeline.broker.connection import Scripts
from pipeline.errors import MessageError
from pipeline.logs import get_logger
from pipeline.wire.keys import SCORE_GROUP, Keys
from pipeline.wire.messages import ScoreJob, ScoreResult, decode, encode
from pipeline.wire.tokens import FloatArray, TokenArray

_MOST_GIVEN = 3  # scorers that may die over one job
_KEEP_ANSWERS_S = 600.0
_GROUP_GONE = ("NOGROUP", "UNBLOCKED")


@dataclass(frozen=True)
class TakenJob:
    """One job in this scorer's hands."""

    entry_id: str
    job: ScoreJob
    until: float = math.inf  # time.monotonic() after which nobody waits for the answer

    @property
    def has_expired(self) -> bool:
        """Whether nobody waits for it any more."""
        return time.monotonic() >= self.until


@dataclass(frozen=True)
class _Row:
    """A stream entry; `given`: how often it was given out before."""

    entry_id: str
    given: int
    raw: bytes


_Answer = tuple[str, str, ScoreResult | None]
"""Entry, who asked, and what is answered; None: nobody waits."""


class _Head(msgspec.Struct):
    """What can be read of a job that cannot be read whole."""

    seq_id: str
    version: int
    reply_to: str


def refusal(seq_id: str, version: int, error: str) -> ScoreResult:
    """The answer that there are no scores, and why."""
    return ScoreResult(
        seq_id=seq_id, scored_version=version, positions=TokenArray(), logprobs=FloatArray(), error=error
    )


class ScoreJobs:
    """One scorer's; `name` is that of this process alone. `keep` runs beside it."""

    def __init__(self, client: Redis, keys: Keys, name: str, lease_s: float) -> None:
        self._client, self._scripts = cast(Any, client), Scripts(client)
        self._stream, self._answers, self._name = keys.score_jobs, keys.score_answers, name
        self._lease_s, self._lease_ms = lease_s, max(1, int(lease_s * 1000))
        self._held: set[str] = set()
        self._server_ahead_s = 0.0  # the server's Unix time - time.monotonic()

    async def take(self, count: int, block_ms: int) -> list[TakenJob]:
        """Up to `count` jobs, those first whose scorer is silent; an empty list after `block_ms` without any."""
        rows = await self._take(count)
        if not rows and block_ms > 0:
            rows = await self._take_new(count, block_ms)
        taken: list[TakenJob] = []
        refused: list[_Answer] = []
        for row in rows:
            found = self._open(row)
            if isinstance(found, TakenJob):
                taken.append(found)
            elif found is not None:
                refused.append(found)
        self._held.update(one.entry_id for one in taken)
        await self._put_out(refused)
        return taken

    async def answer(self, answers: Sequence[tuple[TakenJob, ScoreResult | None]]) -> int:
        """Answer jobs, in one call; None where nobody waits any more. The number of first answers among them."""
        put = await self._put_out([(taken.entry_id, taken.job.reply_to, result) for taken, result in answers])
        self._held.difference_update(taken.entry_id for taken, _ in answers)
        return put

    async def keep(self) -> None:
        """Renew what is held until cancelled, so that long work is not taken for silence."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._renew(idle_ms=0)

    async def release(self) -> None:
        """Give what is held to the others at once."""
        await self._renew(idle_ms=self._lease_ms)
        self._held.clear()

    async def _take(self, count: int) -> list[_Row]:
        args = [SCORE_GROUP, self._name, count, self._lease_ms]
        now_ms, *rows = await self._scripts.run("score_take", [self._stream], args)
        self._server_ahead_s = now_ms / 1000 - time.monotonic()
        return [_Row(entry_id.decode(), int(given), _raw(flat)) for entry_id, given, flat in rows]

    async def _take_new(self, count: int, block_ms: int) -> list[_Row]:
        read = self._client.xreadgroup(SCORE_GROUP, self._name, {self._stream: ">"}, count=count, block=block_ms)
        try:
            answer = cast("list[Any]", await read)
        except ResponseError as error:
            if not any(word in str(error) for word in _GROUP_GONE):
                raise
            return []  # the next call makes the group
        return [_Row(entry_id.decode(), 0, fields.get(b"s", b"")) for _, rows in answer for entry_id, fields in rows]

    def _open(self, row: _Row) -> TakenJob | _Answer | None:
        """The job; or how it ends here; or None for one that is in hand already."""
        if row.entry_id in self._held:
            return None
        try:
            job = decode(ScoreJob, row.raw)
        except MessageError as error:
            get_logger().warning("unreadable score job discarded", entry=row.entry_id, error=str(error))
            return row.entry_id, *_answer_to_unreadable(row.raw, str(error))
        until = job.expires_at - self._server_ahead_s if job.expires_at else math.inf
        taken = TakenJob(row.entry_id, job, until)
        if taken.has_expired:
            return row.entry_id, job.reply_to, None
        if row.given >= _MOST_GIVEN:
            error = f"{row.given} scorers took this job and did not answer; their logs say why"
            get_logger().warning("score job given up", seq_id=job.seq_id, version=job.version, error=error)
            return row.entry_id, job.reply_to, refusal(job.seq_id, job.version, error)
        return taken

    async def _put_out(self, answers: Sequence[_Answer]) -> int:
        if not answers:
            return 0
        args: list[Any] = [SCORE_GROUP, int(_KEEP_ANSWERS_S * 1000)]
        for entry_id, reply_to, result in answers:
            args += [entry_id, encode(result) if result is not None and reply_to else b""]
        lists = [self._answers + reply_to for _, reply_to, _ in answers]
        return int(await self._scripts.run("score_answer", [self._stream, *lists], args))

    async def _renew(self, idle_ms: int) -> None:
        if self._held:
            args = [SCORE_GROUP, self._name, idle_ms, *self._held]
            await self._scripts.run("score_renew", [self._stream], args)


def _raw(flat: Sequence[bytes]) -> bytes:
    return dict(zip(flat[::2], flat[1::2], strict=True)).get(b"s", b"")


def _answer_to_unreadable(raw: bytes, error: str) -> tuple[str, ScoreResult | None]:
    try:
        head = msgspec.msgpack.decode(raw, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "", None
    return head.reply_to, refusal(head.seq_id, head.version, error)
