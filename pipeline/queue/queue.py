"""The queue of one run: every Lua script that moves jobs.

- A claim carries an attempt number and the owner's nonce; commit, renew, release and fail are refused without them.
- A redelivered job names the committed indices, and brings the stored progress of the others.
- Every call is idempotent: after a lost answer it can be repeated.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha1
from typing import Literal, TypeVar, cast

from redis.asyncio import Redis

from sluice.pipeline.broker.connection import is_cluster
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts import jobs as scripts
from sluice.pipeline.broker.scripts.library import Request
from sluice.pipeline.broker.streams import Ownership
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
    why_refused,
)
from sluice.pipeline.wire.keys import ARQ_ABORT, ARQ_JOB, ARQ_RESULT, ARQ_RUNNING, Keys, tagged
from sluice.pipeline.wire.messages import DecodeJob, Progress, decode, encode
from sluice.pipeline.wire.sampled_tokens import SampledTokens

A = TypeVar("A")
_DETAIL_CHARS = 2000
_SHORTEST_PREFIX, _LONGEST_PREFIX = 256, 1 << 14  # tokens
_TRACEBACK_CHARS = 8000


class JobQueue:
    """The queue as seen by one process; `owner` is this process's nonce.

    `producer`: the role of the run's producer, which this process has; it fences every enqueue.
    """

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        *,
        partitions: int = 1,
        worker: str = "",
        keep_result_s: float = 3600.0,
        producer: Ownership | None = None,
    ) -> None:
        self._scripts, self._producer = Scripts(client), producer
        self.keys, self.worker = keys, worker
        self.owner = secrets.token_hex(8)
        self._num_claims, self._latest = 0, b""
        self.keep_result_s = keep_result_s
        self._keep_ms = int(keep_result_s * 1000)
        self.names = _names(client, keys, partitions, self._keep_ms)

    async def enqueue(
        self, jobs: Sequence[DecodeJob], credit: Credit, cursors: Sequence[str] = (), *, behind: str = ""
    ) -> list[Outcome]:
        """Admit jobs in order; after the first `over_credit`, all that follow are `over_credit` too.

        `cursors[i]` is stored as the source's position once job i is in the queue. Raises SourceRewound if the
        stored position is before `behind`, and as `why_fenced` if the producer's role is lost; nothing is done then.
        """
        now_ms = int(time.time() * 1000)
        rows = [
            scripts.NewJob(
                id=job.job_id,
                payload=arq_payload(job, now_ms),
                n=job.n,
                priority=job.priority,
                defer_ms=0,
                deadline_ms=_ms(job.deadline_s),
                cursor=cursors[i] if cursors else "",
                call="",
                mailbox=job.reply_to or "",
                prefix=" ".join(prefixes(job)),
            )
            for i, job in enumerate(jobs)
        ]
        return await self._enqueue(rows, credit, behind)

    async def enqueue_calls(self, calls: Sequence[Call]) -> list[Outcome]:
        """Admit plain calls; credit doesn't limit them. About a hundred per call is a good batch size."""
        now_ms = int(time.time() * 1000)
        rows = [
            scripts.NewJob(
                id=call.job_id,
                payload=call_payload(call.function, call.args, call.kwargs, now_ms),
                n=1,
                priority=call.priority,
                defer_ms=_ms(call.defer_s),
                deadline_ms=_ms(call.deadline_s),
                cursor="",
                call=call.function,
                mailbox="",
            )
            for call in calls
        ]
        return await self._enqueue(rows, NO_LIMIT, "")

    async def claim(
        self,
        capacity: int,
        lease_s: float,
        max_attempts: int,
        held: int = 0,
        *,
        watch_s: float = 0.0,
        prefix_wait_s: float = 0.0,
        quota: int = 0,
        looks: bool = False,
    ) -> Claimed:
        """Lease ready jobs worth about `capacity` sequences (the last one may exceed it); `held` jobs are ours now.

        `watch_s`: how long this worker polls for jobs that send no signal, if no other does; 0 = never.
        `prefix_wait_s`: how long a rollout's turn is left to the worker that has its earlier ones, if that has room.
        `quota`: sequences of this queue that all workers together may hold; 0 = any number. `looks`: `Claimed.more`
        says without capacity too whether jobs are ready (within the quota).
        """
        self._num_claims += 1
        answer = await self._ask(
            scripts.Claim(
                owner=self.owner,
                worker=self.worker,
                lease_ms=_ms(lease_s),
                capacity=capacity,
                max_deaths=max_attempts,
                held_jobs=held,
                call_number=self._num_claims,
                version=self._latest,
                watch_ms=_ms(watch_s),
                prefix_wait_ms=_ms(prefix_wait_s),
                quota=quota,
                looks=looks,
            )
        )
        self._latest = answer.version
        odd = [row for row in answer.jobs if not _is_text(row.id)]
        for row in odd:
            await self._bury_unreadable_id(row.id, row.attempt)
        rows = [row for row in answer.jobs if row not in odd] if odd else answer.jobs
        claims = [_claim_from(row) for row in rows]
        gone = await self._settle([claim for claim, row in zip(claims, rows, strict=True) if row.foreign])
        return Claimed(
            claims=[claim for claim in claims if claim.job_id not in gone],
            cancelled=answer.cancelled,
            more=answer.more_are_ready,
            must_drain=answer.finish_what_you_hold_first,
            latest=int(answer.version) if answer.version else None,
            over=answer.over + len(gone) + len(odd),
            again_s=answer.again_ms / 1000,
        )

    async def _settle(self, foreign: Sequence[Claim]) -> set[str]:
        """Tell the broker what foreign jobs contain; returns the ids of those that have already ended."""
        if not foreign:
            return set()
        rows = [
            scripts.ReadJob(
                id=claim.job_id,
                attempt=claim.attempt,
                n=claim.job.n if claim.job else 1,
                call="" if claim.job else claim.function or "?",
                enqueued_ms=int(claim.enqueued_at * 1000),
                deadline_ms=_ms(claim.job.deadline_s) if claim.job else 0,
                mailbox=(claim.job.reply_to or "") if claim.job else "",
                priority=claim.job.priority if claim.job else 0,
            )
            for claim in foreign
        ]
        outcomes = await self._ask(scripts.Settle(owner=self.owner, jobs=rows))
        return {claim.job_id for claim, outcome in zip(foreign, outcomes, strict=True) if outcome != "ok"}

    async def commit(self, ended: Sequence[Finished | Called]) -> list[CommitOutcome]:
        """Publish results, each sequence once; `fenced` means that another attempt holds the job."""
        rows: list[scripts.Ended] = []
        for item in ended:
            job_id, attempt = item.claim.job_id, item.claim.attempt
            if isinstance(item, Finished):
                result = item.result
                rows.append(
                    scripts.Ended(job_id, result.index, attempt, len(result.token_ids), encode(result), kept_ms=None)
                )
            else:
                kept_ms = self._keep_ms if item.kept_ms is None else item.kept_ms
                rows.append(scripts.Ended(job_id, 0, attempt, tokens=0, result=item.answer, kept_ms=kept_ms))
        return cast("list[CommitOutcome]", await self._ask(scripts.Commit(owner=self.owner, ended=rows)))

    async def checkpoint(self, pieces: Sequence[Piece]) -> list[str]:
        """Store progress of running sequences: ok | dup | gap | fenced each."""
        rows = [
            scripts.StoredPiece(
                id=piece.claim.job_id,
                index=piece.index,
                attempt=piece.claim.attempt,
                offset=piece.progress.offset,
                tokens=len(piece.progress.token_ids),
                piece=packed(piece.progress),
                delta=piece.delta,
            )
            for piece in pieces
        ]
        return await self._ask(scripts.Checkpoint(owner=self.owner, pieces=rows))

    async def release(
        self,
        claims: Sequence[Claim],
        delay_s: float = 0.0,
        *,
        blame: str = "",
        traceback: str = "",
        most: int = 3,
        tried: bool = False,
    ) -> int:
        """Hand jobs back; returns how many were still ours. `tried`: each used up one of its function's tries.

        With `blame` (why) it counts as if the job had killed a worker: see blame.lua. After `most` deaths while running
        alone, a job is dead.
        """
        if not claims:
            return 0
        request = scripts.Release(
            owner=self.owner,
            delay_ms=_ms(delay_s),
            blame=blame[:_DETAIL_CHARS],
            traceback=traceback[-_TRACEBACK_CHARS:],
            max_deaths=most,
            tried=tried,
            jobs=[scripts.Attempt(claim.job_id, claim.attempt) for claim in claims],
        )
        return await self._ask(request)

    async def fail(
        self,
        claim: Claim,
        reason: str,
        detail: str,
        traceback: str = "",
        ending: Literal["dead", "dropped"] = "dead",
    ) -> int:
        """End a job's uncommitted sequences; returns how many, -1 if the job isn't ours."""
        return await self._ask(
            scripts.Fail(
                owner=self.owner,
                worker=self.worker,
                id=claim.job_id,
                attempt=claim.attempt,
                ending=ending,
                reason=reason,
                detail=detail[:_DETAIL_CHARS],
                traceback=traceback[-_TRACEBACK_CHARS:],
                shown=claim.job_id,
            )
        )

    async def _bury_unreadable_id(self, raw_id: bytes, attempt: int) -> None:
        """No message can carry an id that isn't UTF-8."""
        await self._ask(
            scripts.Fail(
                owner=self.owner,
                worker=self.worker,
                id=raw_id,
                attempt=attempt,
                ending="dead",
                reason="malformed_id",
                detail="the job id is not UTF-8",
                traceback="",
                shown=raw_id.decode(errors="backslashreplace"),
            )
        )

    async def cancel(self, job_ids: Sequence[str]) -> int:
        """Cancel jobs, as arq's Job.abort does; returns how many were in flight.

        Uncommitted sequences end as dropped(cancelled), at the next check by the worker that holds the job, or by any
        worker.
        """
        return await self._ask(scripts.Abort(ids=list(job_ids))) if job_ids else 0

    async def forget(self, job_id: str, n: int = 1, mailbox: str = "") -> list[bytes]:
        """Remove the replies and remaining traces of an ended job, so its id may be enqueued again.

        Returns what that empties of `mailbox`; its owner hears those words now, as some may be of this job.
        """
        return await self._ask(scripts.Forget(id=job_id, n=n, mailbox=mailbox))

    async def stand_down(self, leaving_s: float) -> None:
        """This worker was told to stop: others look for work; if it is killed within `leaving_s`, no job is blamed.

        0 if it holds nothing.
        """
        await self._ask(scripts.StandDown(owner=self.owner, leaving_ms=_ms(leaving_s)))

    async def reap(self, owner: str, max_attempts: int = 3, *, killed: bool = False) -> int:
        """End the leases of a process known to be dead; returns how many jobs it held.

        `killed`: from outside, so no job is blamed.
        """
        return await self._ask(scripts.Reap(owner=owner, max_deaths=max_attempts, killed=killed))

    async def sweep(self, every_s: float, keys_at_once: int = 5000) -> scripts.Swept:
        """End the jobs that a foreign worker took out of the queue, found by scanning part of the server's keys.

        Does nothing if any process scanned less than `every_s` ago. Returns how many sequences ended, and whether the
        scan reached the end of the keys.
        """
        pattern = f"{self.keys.job_state}*"
        swept = await self._ask(scripts.Sweep(every_ms=_ms(every_s), keys_at_once=keys_at_once, pattern=pattern))
        if swept.sequences:
            get_logger().error(
                "a foreign worker takes jobs from this queue: stock arq is supported for producers only",
                ended=swept.sequences,
            )
        return swept

    def renewal(self, lease_s: float, held: Mapping[str, int]) -> scripts.Renew:
        """For job ids and their attempts; the lease keeper calls it from its thread."""
        jobs = [scripts.Attempt(job_id, attempt) for job_id, attempt in held.items()]
        return scripts.Renew(owner=self.owner, lease_ms=_ms(lease_s), jobs=jobs)

    async def renew(self, lease_s: float, held: Mapping[str, int]) -> list[str]:
        """Returns the ids of the lost leases."""
        return await self._ask(self.renewal(lease_s, held))

    async def _enqueue(self, rows: list[scripts.NewJob], credit: Credit, behind: str) -> list[Outcome]:
        request = scripts.Enqueue(
            max_in_flight=credit.max_in_flight,
            max_bytes=credit.max_bytes,
            samples_per_version=credit.samples_per_version,
            max_staleness=credit.max_staleness,
            cursor_before=behind,
            nonce=self._producer.nonce if self._producer else "",
            jobs=rows,
        )
        enqueued = await self._ask(request)
        if enqueued.refused is not None:
            raise await why_refused(self._scripts, self.names.producer, enqueued.refused)
        return enqueued.outcomes

    async def _ask(self, request: Request[A]) -> A:
        return await self._scripts.ask(self.names, request)


def _names(client: Redis, keys: Keys, partitions: int, keep_ms: int) -> scripts.JobNames:
    apart = is_cluster(client)  # arq's abort set has no hash tag, so it's unreachable there
    prefixes = scripts.JobPrefixes(
        state_of=keys.job_state,
        progress_of=keys.progress,
        results_of=keys.results,
        payload_of=ARQ_JOB,
        answer_of=ARQ_RESULT,
        running_of=ARQ_RUNNING,
        claims_of=keys.claim,
        partitions=partitions,
        keep_ms=keep_ms,
        replies_of=keys.replies,
        prefix_of=keys.prefixes,
        tag=tagged(keys.run, "") if apart else "",
    )
    return scripts.JobNames(
        jobs=keys.jobs,
        alone=keys.alone,
        counts=keys.counts,
        dead=keys.dead,
        dropped=keys.dropped,
        wake=keys.wake,
        aborts=keys.aborts if apart else ARQ_ABORT,
        latest=keys.latest,
        source=keys.source,
        leases=keys.leases,
        watch=keys.watch,
        sweep=keys.sweep,
        evaluated=keys.evaluated,
        producer=f"{keys.owner}producer",
        prefixes=prefixes,
    )


def prefixes(job: DecodeJob) -> list[str]:
    """Names of what a job's prompt begins with, the longest beginning first; none for jobs that nobody goes on from.

    Every turn of a rollout has its one name; a caller's prompt of token ids one for each doubling of its length.
    """
    if job.rollout_id is not None:
        return [f"r:{sha1(job.rollout_id.encode()).hexdigest()[:20]}"]
    if not job.reply_to:
        return []
    ids, lengths = array("i", job.prompt_token_ids), list[int]()
    while (length := _SHORTEST_PREFIX << len(lengths)) <= min(len(ids), _LONGEST_PREFIX):
        lengths.append(length)
    return [f"p:{sha1(ids[:length].tobytes()).hexdigest()[:20]}" for length in reversed(lengths)]


def _ms(seconds: float | None) -> int:
    return int((seconds or 0) * 1000)


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _claim_from(row: scripts.LeasedJob) -> Claim:
    job_id = row.id.decode(errors="replace")
    envelope = read_envelope(job_id, row.payload)
    enqueued_at = ((row.foreign and envelope.enqueued_ms) or row.enqueued_ms) / 1000
    left_s = None if row.left_ms is None else row.left_ms / 1000
    if row.foreign and envelope.job and envelope.job.deadline_s:
        left_s = enqueued_at + envelope.job.deadline_s - time.time()
    return Claim(
        job_id=job_id,
        attempt=row.attempt,
        enqueued_at=enqueued_at,
        committed=row.committed,
        job=envelope.job,
        function=envelope.function,
        args=envelope.args,
        kwargs=envelope.kwargs,
        reason=envelope.reason or "",
        problem=envelope.problem,
        first_try=envelope.first_try,
        tries=row.tries,
        alone=row.alone,
        deadline_at=None if left_s is None else time.monotonic() + left_s,
        progress=_progress_of(job_id, row.progress),
    )


def _progress_of(job_id: str, stored: dict[int, bytes]) -> dict[int, Progress]:
    """Unreadable progress is skipped: those tokens are decoded again."""
    found: dict[int, Progress] = {}
    for index, pieces in stored.items():
        try:
            found[index] = joined(pieces)
        except MessageError as error:
            get_logger().warning("stored progress is unusable", sequence=f"{job_id}:{index}", error=str(error))
    return found


_PREFIX = 4  # bytes, little-endian


def packed(piece: Progress) -> bytes:
    """One piece, encoded for appending."""
    raw = encode(piece)
    return len(raw).to_bytes(_PREFIX, "little") + raw


def joined(stored: bytes) -> Progress:
    """All pieces merged, from token 0. Raises MessageError if they don't fit together."""
    whole = SampledTokens()
    at = 0
    while at < len(stored):
        size = int.from_bytes(stored[at : at + _PREFIX], "little")
        piece = decode(Progress, stored[at + _PREFIX : at + _PREFIX + size])
        if piece.offset != len(whole):
            raise MessageError(f"progress: a piece starts at token {piece.offset}, but {len(whole)} are stored")
        whole += piece.sampled
        at += _PREFIX + size
    return Progress.of(0, whole)
