"""Scores of finished sequences under retained versions: the trainer asks just before use, a scorer answers.

    trainer ──ask──▶ score:jobs ──take (score_jobs.py)──▶ scorer ──answer──▶ score:answers:<nonce> ──▶ trainer

| waits for                | unblocked by                                        |
|--------------------------|-----------------------------------------------------|
| the answers, in `ask`    | the last of them; `wait_s`; a cancellation          |

- A job without an answer is no error: its tokens stay marked as not scored.
- Answers are read, not popped: one whose reply got lost on the way is read again. What does not belong to an open job
  (an earlier ask's, a second answer) is discarded.
- A job is in the stream or its answer is in the list, as one step moves it; jobs that are in neither were lost with the
  broker's newest part, and are put out again.
- Nothing stays behind: unanswered jobs leave the stream with the ask, those of a dead trainer expire, and so do
  answers that nobody reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from pipeline.broker.connection import Scripts
from pipeline.errors import MessageError
from pipeline.logs import get_logger
from pipeline.wire.keys import SCORE_GROUP, Keys
from pipeline.wire.messages import ScoreJob, ScoreResult, decode, encode

_POLL_S = 0.05
_PAGE = 64  # jobs in one call
_MOST_LOST = 3  # times that jobs are put out again in one ask


class OpenJobs:
    """The jobs of one ask that have no answer yet."""

    def __init__(self, jobs: Sequence[ScoreJob]) -> None:
        self._open = {(job.seq_id, job.version, tuple(job.positions)): job for job in jobs}  # equal ones are one

    def __len__(self) -> int:
        return len(self._open)

    def jobs(self) -> list[ScoreJob]:
        """By version: a scorer loads each once."""
        return sorted(self._open.values(), key=lambda job: job.version)

    def close(self, answer: ScoreResult) -> bool:
        """Whether this answers a job that was open; it is not any more."""
        pair = (answer.seq_id, answer.scored_version)
        if answer.error:  # it has no positions
            key = next((key for key in self._open if key[:2] == pair), None)
        else:
            key = (*pair, tuple(answer.positions))
        return key is not None and self._open.pop(key, None) is not None


class Scores:
    """The trainer's side; `nonce` is that of this process alone."""

    def __init__(self, client: Redis, keys: Keys, nonce: str) -> None:
        self._client, self._scripts, self._nonce = cast(Any, client), Scripts(client), nonce
        self._stream, self._list = keys.score_jobs, keys.score_answers + nonce

    async def ask(self, jobs: Sequence[ScoreJob], wait_s: float) -> list[ScoreResult]:
        """Have the jobs scored; what came within `wait_s`, in any order. An answer may be an error.

        One ask at a time. `reply_to` and `expires_at` of the jobs are set here. Cancel it to stop waiting.
        """
        waiting = OpenJobs(jobs)
        if not waiting:
            return []
        until = time.monotonic() + wait_s
        putting = asyncio.create_task(self._put(waiting.jobs(), wait_s))
        try:
            found = await self._collect(waiting, await asyncio.shield(putting), until)
        finally:  # also when nobody waits any more, and the jobs are just on their way
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
                get_logger().warning("the broker lost score jobs; they are put out again", jobs=len(waiting))
                entry_ids += await self._put(waiting.jobs(), left_s)
            await asyncio.sleep(min(_POLL_S, left_s))

    async def _put(self, jobs: Sequence[ScoreJob], wait_s: float) -> list[bytes]:
        seconds, micros = await self._client.time()  # the server's: scorers on other hosts have other clocks
        expires_at = seconds + micros / 1e6 + wait_s
        raw = [encode(msgspec.structs.replace(job, reply_to=self._nonce, expires_at=expires_at)) for job in jobs]
        entry_ids: list[bytes] = []
        for start in range(0, len(raw), _PAGE):
            entry_ids += await self._scripts.run("score_put", [self._stream], raw[start : start + _PAGE])
        return entry_ids

    async def _read(self, seen: int) -> tuple[int, list[ScoreResult], int]:
        """Jobs in the stream, then answers after the first `seen`, and how many answers there are by now."""
        pipe: Any = self._client.pipeline(transaction=False)
        pipe.xlen(self._stream)  # first: a job that is answered right after it is among the answers
        pipe.llen(self._list)
        pipe.lrange(self._list, seen, -1)
        queued, length, raw = cast("tuple[int, int, list[bytes]]", await pipe.execute())
        if length < seen:  # the broker lost some of them; those known are discarded when they come again
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
