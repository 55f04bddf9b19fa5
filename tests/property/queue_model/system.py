"""The real queue: the real scripts on a real broker, what lies there, and the passing of time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.queue import JobQueue
from sluice.pipeline.wire.keys import ARQ_ABORT, ARQ_JOB, ARQ_RESULT, ARQ_RUNNING, Keys
from sluice.pipeline.wire.messages import EVALUATION
from tests.property.queue_model.foreign import MAILBOX

LEASE_S = 3600.0  # leases end when the machine says so
PARTITIONS = 2
PREFIX_WAIT_S = 3600.0  # likewise
T = TypeVar("T")
Fields = dict[bytes, bytes]


@dataclass
class Snapshot:
    """Everything of one run, as it lies in the broker."""

    keys: set[str]
    now_ms: float
    line: dict[str, float]  # job id → score
    apart: dict[str, float]
    leases: dict[str, float]
    states: dict[str, dict[str, bytes]]
    payloads: dict[str, bytes]
    running: dict[str, str]  # job id → in-progress key's value
    stored: dict[str, int]  # progress key without its prefix → bytes
    counts: dict[str, int]
    results: list[list[tuple[str, Fields]]]  # by partition
    batches: list[tuple[str, Fields]]
    dead: list[tuple[str, Fields]]
    dropped: list[tuple[str, Fields]]
    evaluated: list[tuple[str, Fields]]
    prefixes: dict[str, str]  # name of a prompt's beginning → the worker that has it
    replies: dict[str, bytes]  # sequence → its stored reply
    mailbox: list[str]  # names of ended sequences, `answer NAME` with the answer in the mailbox itself, and deltas
    aborts: set[str]
    persistent: set[str]  # payloads without a time to live

    def num_bytes(self) -> int:
        """What `counts.bytes` must say: all that is held for unfinished sequences, and dead letters."""
        counted = {job_id for job_id, state in self.states.items() if state.get("reply") != EVALUATION.encode()}
        total = sum(len(payload) for job_id, payload in self.payloads.items() if job_id in counted)
        total += sum(size for name, size in self.stored.items() if name.rpartition(":")[0] in counted)
        total += sum(len(row[b"d"]) + len(row[b"p"]) for _, row in self.dead)
        total += sum(len(row[b"b"]) for _, row in self.batches)
        return total + sum(len(row.get(b"r") or row[b"d"]) for rows in self.results for _, row in rows)


class System:
    """One run on the broker; synchronous, for hypothesis. Job ids are the same in every run, its keys are not."""

    def __init__(self, config: BrokerConfig, keep_s: float) -> None:
        self._runner = asyncio.Runner()
        self.client: Any = connection.connect(config)
        self.keys = Keys(f"model-{uuid4().hex[:12]}")
        self.scripts = Scripts(self.client)
        self._keep_s = keep_s
        self.redis("DEL", ARQ_ABORT)  # the one key that all runs of a server share; other tests leave ids there

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call."""
        return self._runner.run(call)

    def redis(self, *words: Any) -> Any:
        """One plain command."""
        return self.run(self.client.execute_command(*words))

    def queue(self, worker: str) -> JobQueue:
        """A process that uses the queue."""
        return JobQueue(self.client, self.keys, partitions=PARTITIONS, worker=worker, keep_result_s=self._keep_s)

    def close(self) -> None:
        """Delete every key of the run."""
        names = [*self.run(_names(self.client, self.keys)), ARQ_ABORT]
        self.redis("DEL", *names)
        self.run(self.client.aclose())
        self._runner.close()

    # Time passes.

    def lease_ends(self, job_id: str) -> None:
        """A lease runs out."""
        self.redis("DEL", ARQ_RUNNING + job_id)
        for key in (self.keys.jobs, self.keys.leases):
            self.redis("ZADD", key, "XX", self._now_ms(), job_id)

    def delay_ends(self, job_id: str, *, apart: bool) -> None:
        """A job that waits for its time is ready."""
        self.redis("ZADD", self.keys.alone if apart else self.keys.jobs, "XX", self._now_ms(), job_id)

    def has_waited(self, job_id: str, times: float) -> None:
        """A job has been in the queue for so many times PREFIX_WAIT_S."""
        self.redis("HSET", self.keys.job_state + job_id, "at", int(self._now_ms() - times * 1000 * PREFIX_WAIT_S) - 1)

    def deadline_ends(self, job_id: str) -> None:
        """It is too late to start a job."""
        self.redis("HSET", self.keys.job_state + job_id, "expires", self._now_ms() - 1)

    def turn_ends(self) -> None:
        """The workers that were to empty themselves may be gone."""
        self.redis("DEL", f"{self.keys.alone}:turns")

    def role_ends(self, role: str) -> None:
        """A claim of a role runs out."""
        self.redis("DEL", self.keys.owner + role)

    # What foreign programs do.

    def put_foreign(self, job_id: str, payload: bytes) -> None:
        """As arq's enqueue_job writes it."""
        self.redis("SET", ARQ_JOB + job_id, payload, "PX", 86_400_000)
        self.redis("ZADD", self.keys.jobs, self._now_ms(), job_id)

    def hurry(self, job_id: str) -> None:
        """The first half of arq's abort."""
        self.redis("ZREM", self.keys.jobs, job_id)
        self.redis("ZADD", self.keys.jobs, 1, job_id)

    def ask_abort(self, job_id: str) -> None:
        """The second half of arq's abort."""
        self.redis("ZADD", ARQ_ABORT, self._now_ms(), job_id)

    def lose_payload(self, job_id: str) -> None:
        """A payload key runs out, or was evicted."""
        self.redis("DEL", ARQ_JOB + job_id)

    def _now_ms(self) -> float:
        seconds, micros = self.redis("TIME")
        return int(seconds) * 1000 + int(micros) / 1000

    def snapshot(self) -> Snapshot:
        """All that is there."""
        return self.run(_snapshot(self.client, self.keys))


async def _names(client: Any, keys: Keys) -> list[str]:
    found: list[str] = []
    for pattern in (f"{keys.prefix}*", f"{ARQ_JOB}m:*", f"{ARQ_RESULT}m:*", f"{ARQ_RUNNING}m:*"):
        found += [name.decode() for name in await client.keys(pattern)]
    return found


async def _read(
    client: Any,
    keys: Keys,
    states: list[str],
    payloads: list[str],
    running: list[str],
    stored: list[str],
    replies: list[str],
    prefixes: list[str],
) -> list[Any]:
    """Everything at one moment."""
    async with client.pipeline(transaction=True) as pipe:
        pipe.time().hgetall(keys.counts).zrange(keys.jobs, 0, -1, withscores=True)
        pipe.zrange(keys.alone, 0, -1, withscores=True).zrange(keys.leases, 0, -1, withscores=True)
        pipe.zrange(ARQ_ABORT, 0, -1)
        for stream in (
            *(f"{keys.results}{p}" for p in range(PARTITIONS)),
            keys.batches,
            keys.dead,
            keys.dropped,
            keys.evaluated,
        ):
            pipe.xrange(stream)
        for job_id in states:
            pipe.hgetall(keys.job_state + job_id)
        for job_id in payloads:
            pipe.get(ARQ_JOB + job_id).pttl(ARQ_JOB + job_id)
        for job_id in running:
            pipe.get(ARQ_RUNNING + job_id)
        for name in stored:
            pipe.strlen(keys.progress + name)
        for name in replies:
            pipe.get(keys.replies + name)
        for name in prefixes:
            pipe.get(keys.prefixes + name)
        pipe.lrange(f"{keys.replies}mailbox:{MAILBOX}", 0, -1)
        return await pipe.execute()


def _word(word: bytes, replies: Mapping[str, bytes]) -> str:
    """As in `Snapshot.mailbox`; an answer in the mailbox is the stored one."""
    if not word.startswith(b"\xc1"):
        return word.decode()
    size, _, rest = word[1:].partition(b":")
    name, answer = rest[: int(size)].decode(), rest[int(size) :]
    assert replies.get(name, answer) == answer
    return f"answer {name}"


async def _snapshot(client: Any, keys: Keys) -> Snapshot:
    names = await _names(client, keys)
    mailbox = f"{keys.replies}mailbox:{MAILBOX}"
    parts = (keys.job_state, ARQ_JOB, ARQ_RUNNING, keys.progress, keys.replies, keys.prefixes)
    states, payloads, running, stored, replies, prefixes = (
        [name.removeprefix(part) for name in names if name.startswith(part) and name != mailbox] for part in parts
    )
    answers = iter(await _read(client, keys, states, payloads, running, stored, replies, prefixes))
    seconds, micros = next(answers)
    counts = {name.decode(): int(value) for name, value in next(answers).items() if not name.startswith(b"last:")}
    line, apart, leases = (_scores(next(answers)) for _ in range(3))
    aborts = {job_id.decode() for job_id in next(answers)}
    streams = [_rows(next(answers)) for _ in range(PARTITIONS + 4)]
    of_states = {job_id: {k.decode(): v for k, v in next(answers).items()} for job_id in states}
    of_payloads = {job_id: (next(answers), next(answers)) for job_id in payloads}
    return Snapshot(
        keys=set(names),
        now_ms=seconds * 1000 + micros / 1000,
        line=line,
        apart=apart,
        leases=leases,
        states=of_states,
        payloads={job_id: payload for job_id, (payload, _) in of_payloads.items()},
        running={job_id: next(answers).decode() for job_id in running},
        stored={name: next(answers) for name in stored},
        replies=(of_replies := {name: next(answers) for name in replies}),
        prefixes={name: next(answers).decode() for name in prefixes},
        mailbox=[_word(word, of_replies) for word in next(answers)],
        counts=counts,
        results=streams[:PARTITIONS],
        batches=streams[PARTITIONS],
        dead=streams[PARTITIONS + 1],
        dropped=streams[PARTITIONS + 2],
        evaluated=streams[PARTITIONS + 3],
        aborts=aborts,
        persistent={job_id for job_id, (_, left) in of_payloads.items() if left == -1},
    )


def _scores(rows: list[tuple[bytes, float]]) -> dict[str, float]:
    return {job_id.decode(): score for job_id, score in rows}


def _rows(rows: list[tuple[bytes, Fields]]) -> list[tuple[str, Fields]]:
    return [(entry_id.decode(), fields) for entry_id, fields in rows]
