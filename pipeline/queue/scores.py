"""Scores of finished sequences under retained versions: the trainer asks just before use, a scorer answers.

    trainer ──ask──▶ score:jobs ──take──▶ scorer ──answer──▶ score:answers:<nonce> ──▶ trainer

| waits for                | unblocked by                                        |
|--------------------------|-----------------------------------------------------|
| the answers, in `ask`    | the last of them; `wait_s`; a cancellation          |

- A missing answer is not an error: its tokens stay marked as not scored.
- Answers are read, not popped, so a lost reply is read again. Answers to no open job (from an earlier ask, or
  duplicates) are discarded.
- A job is in the stream or its answer is in the list, since the move is atomic; jobs in neither were lost with the
  broker's newest writes, and are added again.
- One scorer holds a job at a time. One that is silent for `lease_s` loses it to another; a second answer to the
  same job changes nothing. A job that is unreadable, or killed its scorers, is answered with an error.
- Nothing is left behind: the ask removes its unanswered jobs from the stream; those of a dead trainer expire, as do
  unread answers.
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

from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.scores import (
    AnswerScores,
    GivenJob,
    PutScores,
    RenewScores,
    ScoreKeys,
    ScoreReply,
    TakeScores,
)
from sluice.pipeline.errors import MessageError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.keys import SCORE_GROUP, Keys
from sluice.pipeline.wire.messages import ScoreJob, ScoreResult, decode, encode
from sluice.pipeline.wire.tokens import FloatArray, TokenArray

_POLL_S = 0.05
_PAGE = 64  # jobs per call
_MOST_LOST = 3  # times that one ask adds lost jobs again


class OpenJobs:
    """The unanswered jobs of one ask."""

    def __init__(self, jobs: Sequence[ScoreJob]) -> None:
        self._open = {(job.seq_id, job.version, tuple(job.positions)): job for job in jobs}  # equal jobs count once

    def __len__(self) -> int:
        return len(self._open)

    def jobs(self) -> list[ScoreJob]:
        """Sorted by version: a scorer loads each once."""
        return sorted(self._open.values(), key=lambda job: job.version)

    def close(self, answer: ScoreResult) -> bool:
        """Close the job that this answers; False if it wasn't open."""
        pair = (answer.seq_id, answer.scored_version)
        if answer.error:  # it has no positions
            key = next((key for key in self._open if key[:2] == pair), None)
        else:
            key = (*pair, tuple(answer.positions))
        return key is not None and self._open.pop(key, None) is not None


class Scores:
    """The trainer's side; `nonce` is unique to this process."""

    def __init__(self, client: Redis, keys: Keys, nonce: str) -> None:
        self._client, self._scripts, self._nonce = cast(Any, client), Scripts(client), nonce
        self._stream, self._list = keys.score_jobs, keys.score_answers + nonce

    async def ask(self, jobs: Sequence[ScoreJob], wait_s: float) -> list[ScoreResult]:
        """Have the jobs scored; returns the answers that arrived within `wait_s`, in any order. An answer may be an
        error.

        One ask at a time. Sets `reply_to` and `expires_at` of the jobs. Cancel it to stop waiting.
        """
        waiting = OpenJobs(jobs)
        if not waiting:
            return []
        until = time.monotonic() + wait_s
        putting = asyncio.create_task(self._put(waiting.jobs(), wait_s))
        try:
            found = await self._collect(waiting, await asyncio.shield(putting), until)
        finally:  # also after a cancellation while jobs are being added
            await self._clear(await putting)
        if waiting:
            get_logger().warning("scores are missing", jobs=len(waiting), waited_s=wait_s)
        return found

    async def _collect(self, waiting: OpenJobs, entry_ids: list[bytes], until: float) -> list[ScoreResult]:
        found: list[ScoreResult] = []
        seen = lost = 0
        while True:
            queued, fresh, seen = await self._read(seen)
            found += [answer for answer in fresh if waiting.close(answer)]
            left_s = until - time.monotonic()
            if not waiting or left_s <= 0:
                return found
            if queued < len(waiting) and lost < _MOST_LOST:
                lost += 1
                get_logger().warning("the broker lost score jobs; enqueueing them again", jobs=len(waiting))
                entry_ids += await self._put(waiting.jobs(), left_s)
            await asyncio.sleep(min(_POLL_S, left_s))

    async def _put(self, jobs: Sequence[ScoreJob], wait_s: float) -> list[bytes]:
        seconds, micros = await self._client.time()  # the server's: scorers on other hosts have other clocks
        expires_at = seconds + micros / 1e6 + wait_s
        raw = [encode(msgspec.structs.replace(job, reply_to=self._nonce, expires_at=expires_at)) for job in jobs]
        entry_ids: list[bytes] = []
        for start in range(0, len(raw), _PAGE):
            page = PutScores(jobs=raw[start : start + _PAGE])
            entry_ids += await self._scripts.ask(ScoreKeys(stream=self._stream), page)
        return entry_ids

    async def _read(self, seen: int) -> tuple[int, list[ScoreResult], int]:
        """Jobs in the stream, then answers after the first `seen`, and the number of answers by now."""
        pipe: Any = self._client.pipeline(transaction=False)
        pipe.xlen(self._stream)  # first: a job answered right after it is among the answers
        pipe.llen(self._list)
        pipe.lrange(self._list, seen, -1)
        queued, length, raw = cast("tuple[int, int, list[bytes]]", await pipe.execute())
        if length < seen:  # the broker lost some; known ones are discarded when they come again
            return queued, [], 0
        return queued, [answer for answer in map(_answer, raw) if answer], seen + len(raw)

    async def _clear(self, entry_ids: Sequence[bytes]) -> None:
        pipe: Any = self._client.pipeline(transaction=False)
        pipe.xack(self._stream, SCORE_GROUP, *entry_ids)
        pipe.xdel(self._stream, *entry_ids)
        pipe.delete(self._list)
        await pipe.execute()


def _answer(raw: bytes) -> ScoreResult | None:
    try:
        return decode(ScoreResult, raw)
    except MessageError as error:
        get_logger().warning("unreadable score discarded", error=str(error))
        return None


_MOST_GIVEN = 3  # scorers that may die on one job
_KEEP_ANSWERS_S = 600.0
_GROUP_GONE = ("NOGROUP", "UNBLOCKED")


@dataclass(frozen=True)
class TakenJob:
    """One job held by this scorer."""

    entry_id: str
    job: ScoreJob
    until: float = math.inf  # time.monotonic() after which nobody waits for the answer

    @property
    def has_expired(self) -> bool:
        """Whether nobody waits for it any more."""
        return time.monotonic() >= self.until


_Answer = tuple[str, str, ScoreResult | None]
"""Entry, who asked, and what is answered; None: nobody waits."""


class _Head(msgspec.Struct):
    """The fields that an unreadable job may still have."""

    seq_id: str
    version: int
    reply_to: str


def refusal(seq_id: str, version: int, error: str) -> ScoreResult:
    """An answer with an error instead of scores."""
    return ScoreResult(
        seq_id=seq_id, scored_version=version, positions=TokenArray(), logprobs=FloatArray(), error=error
    )


class ScoreJobs:
    """One scorer's side; `name` is unique to this process. Run `keep` alongside it."""

    def __init__(self, client: Redis, keys: Keys, name: str, lease_s: float) -> None:
        self._client, self._scripts = cast(Any, client), Scripts(client)
        self._stream, self._answers, self._name = keys.score_jobs, keys.score_answers, name
        self._lease_s, self._lease_ms = lease_s, max(1, int(lease_s * 1000))
        self._held: set[str] = set()
        self._server_ahead_s = 0.0  # the server's Unix time - time.monotonic()

    async def take(self, count: int, block_ms: int) -> list[TakenJob]:
        """Up to `count` jobs, those of silent scorers first; an empty list after `block_ms` without any."""
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
        """Answer jobs in one call; None if nobody waits any more. Returns the number of first answers among them."""
        put = await self._put_out([(taken.entry_id, taken.job.reply_to, result) for taken, result in answers])
        self._held.difference_update(taken.entry_id for taken, _ in answers)
        return put

    async def keep(self) -> None:
        """Renew the held jobs until cancelled, so that long work doesn't look like silence."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._renew(idle_ms=0)

    async def release(self) -> None:
        """Hand the held jobs to other scorers at once."""
        await self._renew(idle_ms=self._lease_ms)
        self._held.clear()

    async def _take(self, count: int) -> list[GivenJob]:
        request = TakeScores(group=SCORE_GROUP, scorer=self._name, count=count, lease_ms=self._lease_ms)
        taken = await self._scripts.ask(ScoreKeys(stream=self._stream), request)
        self._server_ahead_s = taken.now_ms / 1000 - time.monotonic()
        return taken.jobs

    async def _take_new(self, count: int, block_ms: int) -> list[GivenJob]:
        read = self._client.xreadgroup(SCORE_GROUP, self._name, {self._stream: ">"}, count=count, block=block_ms)
        try:
            answer = cast("list[Any]", await read)
        except ResponseError as error:
            if not any(word in str(error) for word in _GROUP_GONE):
                raise
            return []  # the next call creates the group
        return [
            GivenJob(entry_id.decode(), 0, fields.get(b"s", b"")) for _, rows in answer for entry_id, fields in rows
        ]

    def _open(self, row: GivenJob) -> TakenJob | _Answer | None:
        """The job; or the answer that ends it here; or None if this scorer already holds it."""
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
            error = f"{row.given} scorers took this job without answering; see their logs"
            get_logger().warning("score job given up", seq_id=job.seq_id, version=job.version, error=error)
            return row.entry_id, job.reply_to, refusal(job.seq_id, job.version, error)
        return taken

    async def _put_out(self, answers: Sequence[_Answer]) -> int:
        if not answers:
            return 0
        rows = [
            ScoreReply(entry_id, encode(result) if result is not None and reply_to else b"")
            for entry_id, reply_to, result in answers
        ]
        names = ScoreKeys(stream=self._stream, lists=[self._answers + reply_to for _, reply_to, _ in answers])
        request = AnswerScores(group=SCORE_GROUP, keep_ms=int(_KEEP_ANSWERS_S * 1000), answers=rows)
        return await self._scripts.ask(names, request)

    async def _renew(self, idle_ms: int) -> None:
        if self._held:
            request = RenewScores(group=SCORE_GROUP, scorer=self._name, idle_ms=idle_ms, entry_ids=list(self._held))
            await self._scripts.ask(ScoreKeys(stream=self._stream), request)


def _answer_to_unreadable(raw: bytes, error: str) -> tuple[str, ScoreResult | None]:
    try:
        head = msgspec.msgpack.decode(raw, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "", None
    return head.reply_to, refusal(head.seq_id, head.version, error)
