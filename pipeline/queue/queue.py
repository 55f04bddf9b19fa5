"""The queue of one run: every call of a script that moves jobs.

- A claim carries an attempt number and the owner's nonce; commit, renew, release and fail are refused without them.
- A redelivered job names the indices that are committed, and brings the stored progress of the others.
- Every call may be repeated: a lost answer changes nothing twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal, cast

from redis.asyncio import Redis

from sluice.pipeline.broker.connection import Scripts, is_cluster
from sluice.pipeline.errors import MessageError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.envelope import arq_payload, call_payload, read_envelope
from sluice.pipeline.queue.types import (
    NO_LIMIT,
    Call,
    Called,
    Claim,
    Claimed,
    CommitOutcome,
    Credit,
    Finished,
    Outcome,
    Piece,
    SourceRewound,
)
from sluice.pipeline.wire.keys import ARQ_ABORT, ARQ_JOB, ARQ_RESULT, ARQ_RUNNING, Keys, tagged
from sluice.pipeline.wire.messages import DecodeJob, Progress, decode, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray

_FOREIGN = 8  # place in a row of claim.lua
_DETAIL_CHARS = 2000
_TRACEBACK_CHARS = 8000


class JobQueue:
    """The queue as one process sees it; `owner` is this process's nonce."""

    def __init__(
        self, client: Redis, keys: Keys, *, partitions: int = 1, worker: str = "", keep_result_s: float = 3600.0
    ) -> None:
        self._scripts = Scripts(client)
        self.keys, self.worker = keys, worker
        self.owner = secrets.token_hex(8)
        self._num_claims, self._latest = 0, b""
        self.script_keys = [keys.jobs, keys.alone, keys.counts, keys.dead, keys.dropped]
        apart = is_cluster(client)  # arq's set of aborts has no tag: it is out of reach there
        self.script_keys += [keys.wake, keys.aborts if apart else ARQ_ABORT, keys.latest, keys.source, keys.leases]
        self.script_keys += [keys.watch, keys.sweep]
        self.script_args: list[Any] = [keys.job_state, keys.progress, keys.results, ARQ_JOB, ARQ_RESULT, ARQ_RUNNING]
        self.script_args += [keys.claim]
        self._keep_ms = int(keep_result_s * 1000)
        self.script_args += [partitions, self._keep_ms, keys.replies, tagged(keys.run, "") if apart else ""]

    async def enqueue(
        self, jobs: Sequence[DecodeJob], credit: Credit, cursors: Sequence[str] = (), *, behind: str = ""
    ) -> list[Outcome]:
        """Admit jobs in order; after the first `over_credit` all that follow are `over_credit` too.

        `cursors[i]` is stored as the source's position once job i is in the queue. Raises SourceRewound when the
        stored position is before `behind`.
        """
        args: list[Any] = []
        now_ms = int(time.time() * 1000)
        for i, job in enumerate(jobs):
            args += [job.job_id, arq_payload(job, now_ms), job.n, job.priority, 0, int((job.deadline_s or 0) * 1000)]
            args += [cursors[i] if cursors else "", "", job.reply_to or ""]
        return await self._enqueue(args, credit, behind)

    async def enqueue_calls(self, calls: Sequence[Call]) -> list[Outcome]:
        """Admit plain calls; credit does not limit them. A hundred a call is a good number."""
        args: list[Any] = []
        now_ms = int(time.time() * 1000)
        for call in calls:
            payload = call_payload(call.function, call.args, call.kwargs, now_ms)
            args += [call.job_id, payload, 1, call.priority, int(call.defer_s * 1000)]
            args += [int((call.deadline_s or 0) * 1000), "", call.function, ""]
        return await self._enqueue(args, NO_LIMIT, "")

    async def claim(
        self, capacity: int, lease_s: float, max_attempts: int, held: int = 0, *, watch_s: float = 0.0
    ) -> Claimed:
        """Lease ready jobs worth about `capacity` sequences (the last one may go over); `held` jobs are ours now.

        `watch_s`: how long this worker answers for what rings no bell, if nobody else does; 0 = never.
        """
        self._num_claims += 1
        args = [self.owner, self.worker, int(lease_s * 1000), capacity, max_attempts, held, self._num_claims]
        args += [self._latest, int(watch_s * 1000)]
        rows, cancelled, more, busy, self._latest, over, again_ms = await self._run("claim", args)
        odd = [row for row in rows if not _is_text(row[0])]
        for row in odd:
            await self._bury_unreadable_id(row[0], int(row[2]))
        rows = [row for row in rows if row not in odd] if odd else rows
        claims = [_claim_from(row) for row in rows]
        foreign = [claim for claim, row in zip(claims, rows, strict=True) if row[_FOREIGN]]
        gone = await self._settle(foreign)
        return Claimed(
            claims=[claim for claim in claims if claim.job_id not in gone],
            cancelled=[job_id.decode(errors="replace") for job_id in cancelled],
            more=bool(more),
            must_drain=bool(busy),
            latest=int(self._latest) if self._latest else None,
            over=int(over) + len(gone) + len(odd),
            again_s=int(again_ms) / 1000,
        )

    async def _settle(self, foreign: Sequence[Claim]) -> set[str]:
        """Tell the broker what foreign jobs are; the ids of those that are over already."""
        if not foreign:
            return set()
        args: list[Any] = [self.owner]
        for claim in foreign:
            job = claim.job
            call = "" if job else claim.function or "?"
            deadline_ms = int((job.deadline_s or 0) * 1000) if job else 0
            args += [claim.job_id, claim.attempt, job.n if job else 1, call, int(claim.enqueued_at * 1000), deadline_ms]
            args.append((job.reply_to or "") if job else "")
        answer = await self._run("settle", args)
        return {claim.job_id for claim, outcome in zip(foreign, answer, strict=True) if outcome != b"ok"}

    async def commit(self, ended: Sequence[Finished | Called]) -> list[CommitOutcome]:
        """Publish results, each sequence once; `fenced` means that another attempt holds the job."""
        args: list[Any] = [self.owner]
        for item in ended:
            args += [item.claim.job_id]
            if isinstance(item, Finished):
                result = item.result
                args += [result.index, item.claim.attempt, len(result.token_ids), encode(result), ""]
            else:
                kept_ms = self._keep_ms if item.kept_ms is None else item.kept_ms
                args += [0, item.claim.attempt, 0, item.answer, kept_ms]
        answer = await self._run("commit", args)
        return [cast(CommitOutcome, item.decode()) for item in answer]

    async def checkpoint(self, pieces: Sequence[Piece]) -> list[str]:
        """Store progress of running sequences: ok | dup | gap | fenced each."""
        args: list[Any] = [self.owner]
        for piece in pieces:
            progress = piece.progress
            args += [piece.claim.job_id, piece.index, piece.claim.attempt, progress.offset]
            args += [len(progress.token_ids), packed(progress), piece.delta]
        return [item.decode() for item in await self._run("checkpoint", args)]

    async def release(
        self,
        claims: Sequence[Claim],
        delay_s: float = 0.0,
        *,
        blame: str = "",
        traceback: str = "",
        most: int = 3,
        excused: bool = True,
    ) -> int:
        """Hand jobs back; returns how many were still ours. An excused attempt is no try.

        With `blame` (why) it counts like a worker's death over them: see blame.lua. After `most` deaths while it ran
        alone a job is dead.
        """
        args: list[Any] = [self.owner, int(delay_s * 1000), blame[:_DETAIL_CHARS], traceback[-_TRACEBACK_CHARS:], most]
        args.append(int(excused))
        for claim in claims:
            args += [claim.job_id, claim.attempt]
        return int(await self._run("release", args)) if claims else 0

    async def fail(
        self,
        claim: Claim,
        reason: str,
        detail: str,
        traceback: str = "",
        ending: Literal["dead", "dropped"] = "dead",
    ) -> int:
        """End a job's uncommitted sequences; returns how many, -1 if the job is not ours."""
        args = [self.owner, self.worker, claim.job_id, claim.attempt, ending, reason]
        args += [detail[:_DETAIL_CHARS], traceback[-_TRACEBACK_CHARS:], claim.job_id]
        return int(await self._run("fail", args))

    async def _bury_unreadable_id(self, raw_id: bytes, attempt: int) -> None:
        """No message can carry an id that is not UTF-8."""
        shown = raw_id.decode(errors="backslashreplace")
        args = [self.owner, self.worker, raw_id, attempt, "dead", "malformed_id", "the job id is not UTF-8", "", shown]
        await self._run("fail", args)

    async def cancel(self, job_ids: Sequence[str]) -> int:
        """Ask for jobs to be ended, as arq's Job.abort does; returns how many were under way.

        What is not committed ends as dropped(cancelled), at the next look of the worker that holds it, or of any.
        """
        return int(await self._run("abort", list(job_ids))) if job_ids else 0

    async def forget(self, job_id: str, n: int = 1) -> None:
        """Remove the replies of an ended job, and that it was there: its id may be enqueued again."""
        await self._run("forget", [job_id, n])

    async def stand_down(self, leaving_s: float) -> None:
        """This worker was told to end: others look for work; if it is killed within `leaving_s`, no job is to blame.

        0 where it holds nothing.
        """
        await self._run("stand_down", [self.owner, int(leaving_s * 1000)])

    async def reap(self, owner: str, max_attempts: int = 3, *, killed: bool = False) -> int:
        """End the leases of a process that is known to be dead; returns how many jobs it held.

        `killed`: from outside, as far as is known, so that no job is to blame.
        """
        return int(await self._run("reap", [owner, max_attempts, int(killed)]))

    async def sweep(self, every_s: float, keys_at_once: int = 5000) -> tuple[int, bool]:
        """End the jobs that a foreign worker took out of the queue, found among some of the server's keys.

        Does nothing when anybody looked less than `every_s` ago. Returns how many sequences ended, and whether the
        look came to the end of the keys.
        """
        args = [int(every_s * 1000), keys_at_once, f"{self.keys.job_state}*"]
        ended, whole = await self._run("sweep", args)
        if ended:
            get_logger().error("a foreign worker takes jobs from this queue: only producers may be arq's", ended=ended)
        return int(ended), bool(whole)

    def renewal(self, lease_s: float, held: dict[str, int]) -> tuple[list[str], list[Any]]:
        """Keys and arguments of renew.lua for job ids and their attempts (called from the keeper's thread)."""
        args: list[Any] = [*self.script_args, self.owner, int(lease_s * 1000)]
        for job_id, attempt in held.items():
            args += [job_id, attempt]
        return self.script_keys, args

    async def _enqueue(self, per_job: list[Any], credit: Credit, behind: str) -> list[Outcome]:
        limits = [credit.max_in_flight, credit.max_bytes, credit.samples_per_version, credit.max_staleness]
        answer = [item.decode() for item in await self._run("enqueue", [*limits, behind, *per_job])]
        if answer and answer[0] == "rewound":
            raise SourceRewound(answer[1])
        return cast("list[Outcome]", answer)

    async def _run(self, name: str, args: Sequence[Any]) -> Any:
        return await self._scripts.run(name, self.script_keys, [*self.script_args, *args])


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _claim_from(row: list[Any]) -> Claim:
    raw_id, payload, attempt, at_ms, left_ms, alone, done, progress, foreign, excused = row
    job_id = raw_id.decode(errors="replace")
    envelope = read_envelope(job_id, payload)
    enqueued_at = ((foreign and envelope.enqueued_ms) or int(at_ms)) / 1000
    left_s = None if left_ms == b"" else int(left_ms) / 1000
    if foreign and envelope.job and envelope.job.deadline_s:
        left_s = enqueued_at + envelope.job.deadline_s - time.time()
    return Claim(
        job_id=job_id,
        attempt=int(attempt),
        enqueued_at=enqueued_at,
        committed=frozenset(map(int, done.split(b","))) if done else frozenset(),
        job=envelope.job,
        function=envelope.function,
        args=envelope.args,
        kwargs=envelope.kwargs,
        problem=envelope.problem,
        first_try=envelope.first_try,
        excused=int(excused),
        alone=bool(alone),
        deadline_at=None if left_s is None else time.monotonic() + left_s,
        progress=_progress_of(job_id, progress),
    )


def _progress_of(job_id: str, stored: list[Any]) -> dict[int, Progress]:
    """What cannot be read is decoded again: it is only a shortcut."""
    found: dict[int, Progress] = {}
    for index, pieces in zip(stored[::2], stored[1::2], strict=True):
        try:
            found[int(index)] = joined(pieces)
        except MessageError as error:
            get_logger().warning("stored progress is unusable", sequence=f"{job_id}:{index}", error=str(error))
    return found


_PREFIX = 4  # bytes, little-endian


def packed(piece: Progress) -> bytes:
    """One piece, ready to be appended."""
    raw = encode(piece)
    return len(raw).to_bytes(_PREFIX, "little") + raw


def joined(stored: bytes) -> Progress:
    """All pieces as one, from token 0. Raises MessageError when they do not fit together."""
    tokens, logprobs, versions = TokenArray(), FloatArray(), list[int]()
    at = 0
    while at < len(stored):
        size = int.from_bytes(stored[at : at + _PREFIX], "little")
        piece = decode(Progress, stored[at + _PREFIX : at + _PREFIX + size])
        if piece.offset != len(tokens):
            raise MessageError(f"progress: a piece starts at token {piece.offset}, {len(tokens)} were stored before")
        tokens.extend(piece.token_ids)
        logprobs.extend(piece.logprobs)
        versions += list(piece.versions)
        at += _PREFIX + size
    return Progress(offset=0, token_ids=tokens, logprobs=logprobs, versions=Runs.of(versions))
