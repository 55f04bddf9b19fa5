"""Types that callers of the queue see."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import msgspec

from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.jobs import Outcome as Outcome
from sluice.pipeline.broker.scripts.streams import Refused
from sluice.pipeline.broker.streams import why_fenced
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.wire.codec import integer_or
from sluice.pipeline.wire.keys import tagged
from sluice.pipeline.wire.messages import DecodeJob, Progress, SequenceResult

CommitOutcome = Literal["ok", "dup", "fenced"]
"""dup: committed before; fenced: this attempt does not hold the job any more."""


class SourceRewound(SluiceError):
    """The broker lost its newest writes (a power loss): the source has to be reread from after `cursor`."""

    def __init__(self, cursor: str) -> None:
        super().__init__(f"the broker went back to source position {cursor}")
        self.cursor = cursor


async def why_refused(scripts: Scripts, owner_key: str, refused: Refused) -> SluiceError:
    """The error for a producer: as `why_fenced`, or SourceRewound."""
    return SourceRewound(refused.cursor) if refused.word == "rewound" else await why_fenced(scripts, owner_key)


def read_cursor(raw: bytes) -> tuple[int, int] | None:
    """Epoch and row of a stored position, each -1 before the first; None if it isn't valid."""
    epoch, _, row = raw.partition(b":")
    found = integer_or(epoch, None, least=-1), integer_or(row, None, least=-1)
    return None if found[0] is None or found[1] is None else (found[0], found[1])


class Credit(msgspec.Struct, frozen=True):
    """How far enqueueing may run ahead: sequences, versions, bytes. A job alone is limited by the versions only."""

    max_in_flight: int
    samples_per_version: int
    max_staleness: int
    max_bytes: int = 1 << 30


_IN_STEP = re.compile(r"-(\d{1,9})\.(\d{1,9})\.(\d{1,9})$", re.ASCII)
NO_LIMIT = Credit(0, 0, 0, 0)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A plain function call, for a LeasedWorker that knows the function; the same as arq's enqueue_job makes."""

    job_id: str
    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    priority: int = 0  # 0 to 1000, higher goes first
    defer_s: float = 0.0
    deadline_s: float | None = None  # must start within this many seconds of enqueue


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One leased job. `job` is None for calls, and for jobs that can't be done."""

    job_id: str
    attempt: int
    enqueued_at: float  # Unix seconds
    committed: frozenset[int] = frozenset()
    job: DecodeJob | None = None
    function: str = ""
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = {}
    reason: str = ""  # of the dead letter, if it can't be done
    problem: str = ""  # why it can't be done
    first_try: int = 1  # the first value of arq's job_try, set by the caller
    tries: int = 0  # attempts that the function gave up itself
    alone: bool = False  # suspected of killing workers: only suspects from the same claim run alongside it
    deadline_at: float | None = None  # time.monotonic() seconds
    progress: dict[int, Progress] = {}  # index → tokens that an earlier attempt decoded


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one claim."""

    claims: list[Claim]
    cancelled: list[str]  # our jobs that their caller aborted; they have ended
    more: bool  # more jobs are ready
    must_drain: bool  # suspects wait for an empty worker: finish the held jobs first
    latest: int | None  # newest weight version
    again_s: float = 0.0  # another worker polls for jobs without a signal until then; 0 = none does
    over: int = 0  # jobs that ended without starting: expired, cancelled, payload missing


class Finished(msgspec.Struct, frozen=True):
    """One sequence ready to commit."""

    claim: Claim
    result: SequenceResult


class Called(msgspec.Struct, frozen=True):
    """One plain call that has ended; `answer` is arq's result, encoded."""

    claim: Claim
    answer: bytes
    kept_ms: int | None = None  # how long arq's result is kept; -1 = for ever, None = the worker's default


class Piece(msgspec.Struct, frozen=True):
    """Progress of one running sequence, ready to store."""

    claim: Claim
    index: int
    progress: Progress
    delta: bytes = b""  # a TokenDelta, for the job's caller


def job_id_for(run: str, source_row: str, epoch: int, sampling: Any, n: int) -> str:
    """Deterministic: the same row, epoch, sampling and n give the same id."""
    return tagged(run, _digest(source_row, epoch, sampling, n))


class StepRow(NamedTuple):
    """Which optimiser step of a deterministic run trains a prompt's sequences."""

    step: int  # from 0
    row: int  # among the step's prompts, from 0
    rows: int  # prompts of the step


def id_in_step(job_id: str, place: StepRow) -> str:
    """The id of a prompt's job in a deterministic run; its tombstones have nothing else that tells the step."""
    return f"{job_id}-{place.step}.{place.row}.{place.rows}"


def step_row_of(job_id: str) -> StepRow | None:
    """The inverse; None for any other job."""
    found = _IN_STEP.search(job_id)
    return found and StepRow(*map(int, found.groups()))


def rollout_group_for(run: str, source_row: str, epoch: int, sampling: Any, n: int) -> str:
    """Like `job_id_for`, for ids that aren't arq keys and appear in URLs: without braces."""
    return f"{run}:{_digest(source_row, epoch, sampling, n)}"


def _digest(*parts: Any) -> str:
    return sha256(msgspec.json.encode(parts)).hexdigest()[:24]


def seed_for(run_seed: int, job_id: str, index: int) -> int:
    """63-bit seed of one sequence; the same after a redelivery."""
    return int.from_bytes(sha256(f"{run_seed}:{job_id}:{index}".encode()).digest()[:8], "little") >> 1
