"""Decode jobs on the queue: arq's envelope and keys, our leases. The only module that imports arq.

    enqueue ─▶ ready ──claim──▶ leased ──commit × n──▶ done (tombstone)
                 ▲                │ └──fail──▶ dead letters
                 └──release / lease ran out

- A claim carries an attempt number and the owner's nonce; commit, renew and release are refused without them.
- A redelivered job names the indices that are already committed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, cast

import msgspec
from arq.connections import RedisSettings
from arq.constants import job_key_prefix
from arq.jobs import DeserializationError, deserialize_job_raw, serialize_job
from redis.asyncio import Redis

from pipeline.broker import Scripts
from pipeline.errors import MessageError, UnknownSchema
from pipeline.keys import ARQ_JOB, Keys
from pipeline.messages import DecodeJob, SequenceResult, decode, encode

FUNCTION = "decode"
TOMBSTONE_S = 24 * 3600
Outcome = Literal["enqueued", "duplicate", "done", "over_credit"]
CommitOutcome = Literal["ok", "dup", "fenced"]

assert job_key_prefix == ARQ_JOB


@dataclass(frozen=True)
class Credit:
    """How far enqueueing may run ahead; sequences and versions."""

    max_in_flight: int
    samples_per_version: int
    max_staleness: int


@dataclass(frozen=True)
class Claim:
    """One leased job. `job` is None when its payload cannot be read; `problem` then says why."""

    job_id: str
    attempt: int
    enqueued_at: float  # Unix seconds
    committed: frozenset[int]
    job: DecodeJob | None
    problem: str = ""


@dataclass(frozen=True)
class Finished:
    """One sequence that is ready to be committed."""

    claim: Claim
    result: SequenceResult


def job_id_for(run: str, source_row: str, epoch: int, sampling: Any, n: int) -> str:
    """Deterministic: the same row, epoch, sampling and n give the same id."""
    parts = msgspec.json.encode([source_row, epoch, sampling, n])
    return f"{run}:{sha256(parts).hexdigest()[:24]}"


def seed_for(run_seed: int, job_id: str, index: int) -> int:
    """63-bit seed of one sequence; the same after a redelivery."""
    return int.from_bytes(sha256(f"{run_seed}:{job_id}:{index}".encode()).digest()[:8], "little") >> 1


def arq_payload(job: DecodeJob, enqueued_ms: int = 0) -> bytes:
    """arq's envelope around the job."""
    return serialize_job(FUNCTION, (encode(job),), {}, None, enqueued_ms, serializer=arq_serializer)


def arq_serializer(value: dict[str, Any]) -> bytes:
    """For foreign programs: `create_pool(..., job_serializer=arq_serializer)`."""
    return msgspec.msgpack.encode(value)


def arq_deserializer(raw: bytes) -> dict[str, Any]:
    """The counterpart of `arq_serializer`."""
    return cast("dict[str, Any]", msgspec.msgpack.decode(raw))


def arq_redis_settings(url: str) -> RedisSettings:
    """For arq's own command (workers/main.py)."""
    return RedisSettings.from_dsn(url)


class JobQueue:
    """The queue of one run, as one process sees it; `owner` is this process's nonce."""

    def __init__(self, client: Redis, keys: Keys, *, partitions: int = 1, worker: str = "") -> None:
        self._scripts = Scripts(client)
        self.keys = keys
        self.partitions = partitions
        self.worker = worker
        self.owner = secrets.token_hex(8)

    async def enqueue(self, jobs: Sequence[DecodeJob], credit: Credit, cursors: Sequence[str] = ()) -> list[Outcome]:
        """Admit jobs in order; after the first `over_credit` all that follow are `over_credit` too.

        `cursors[i]` is stored as the source's position once job i is in the queue.
        """
        args: list[Any] = [ARQ_JOB, self.keys.job_state, credit.max_in_flight]
        args += [credit.samples_per_version, credit.max_staleness]
        for i, job in enumerate(jobs):
            deadline_ms = int((job.deadline_s or 0) * 1000)
            args += [job.job_id, arq_payload(job), job.n, job.priority, self._stream(job.job_id), deadline_ms]
            args.append(cursors[i] if cursors else "")
        keys = [self.keys.jobs, self.keys.counts, self.keys.latest, self.keys.source]
        answer = await self._scripts.run("enqueue", keys, args)
        return [cast(Outcome, item.decode()) for item in answer]

    async def claim(self, capacity: int, lease_s: float, max_attempts: int) -> list[Claim]:
        """Lease ready jobs worth about `capacity` sequences (the last one may go over)."""
        args = [ARQ_JOB, self.keys.job_state, self.owner, self.worker, int(lease_s * 1000), capacity]
        args += [max_attempts, TOMBSTONE_S * 1000]
        keys = [self.keys.jobs, self.keys.counts, self.keys.dead]
        return [_claim_from(row) for row in await self._scripts.run("claim", keys, args)]

    async def commit(self, finished: Sequence[Finished]) -> list[CommitOutcome]:
        """Publish results, each sequence once; `fenced` means that another attempt holds the job."""
        args: list[Any] = [ARQ_JOB, self.keys.job_state, self.owner, TOMBSTONE_S * 1000]
        for item in finished:
            result, claim = item.result, item.claim
            args += [claim.job_id, result.index, result.group_size, claim.attempt]
            args += [self._stream(claim.job_id), len(result.token_ids), encode(result)]
        answer = await self._scripts.run("commit", [self.keys.jobs, self.keys.counts], args)
        return [cast(CommitOutcome, item.decode()) for item in answer]

    async def release(self, claims: Sequence[Claim], delay_s: float = 0.0) -> int:
        """Hand jobs back without blame; returns how many were still ours."""
        args: list[Any] = [self.keys.job_state, self.owner, int(delay_s * 1000)]
        for claim in claims:
            args += [claim.job_id, claim.attempt]
        return int(await self._scripts.run("release", [self.keys.jobs], args)) if claims else 0

    async def fail(self, claim: Claim, reason: str, detail: str) -> int:
        """End a job's uncommitted sequences as dead; returns how many, -1 if the job is not ours."""
        args = [ARQ_JOB, self.keys.job_state, self.owner, self.worker, TOMBSTONE_S * 1000]
        args += [claim.job_id, claim.attempt, reason, detail[:2000]]
        keys = [self.keys.jobs, self.keys.counts, self.keys.dead]
        return int(await self._scripts.run("fail", keys, args))

    def _stream(self, group_id: str) -> str:
        return self.keys.result_stream(group_id, self.partitions)


def _claim_from(row: list[Any]) -> Claim:
    raw_id, payload, attempt, at_ms, done = row
    job, problem = _read_payload(payload)
    return Claim(
        job_id=raw_id.decode(errors="replace"),
        attempt=int(attempt),
        enqueued_at=int(at_ms) / 1000,
        committed=frozenset(int(part) for part in done.decode().split(",") if part),
        job=job,
        problem=problem,
    )


def _read_payload(payload: bytes) -> tuple[DecodeJob | None, str]:
    """The job inside an envelope, or why it cannot be read; never raises on hostile bytes."""
    try:
        function, args, _, _, _ = deserialize_job_raw(payload, deserializer=arq_deserializer)
    except (DeserializationError, ValueError, TypeError) as error:
        return None, f"malformed envelope: {error.__cause__ or error}"
    if function != FUNCTION:
        return None, f"unknown function: {function!r}; this queue serves {FUNCTION!r}"
    if not isinstance(cast(Any, args), list | tuple) or len(args) != 1 or not isinstance(args[0], bytes):
        return None, "malformed arguments: expected one encoded DecodeJob"
    try:
        return decode(DecodeJob, args[0]), ""
    except UnknownSchema as error:
        return None, f"unknown schema: {error}"
    except MessageError as error:
        return None, f"malformed payload: {error}"
