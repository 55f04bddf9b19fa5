"""What readers of the history see.

- A row is what lists show; a detail is the whole sequence. `step` and `trained` are the trainer's, put in on reading.
- `at` never goes back within one file: order by it is the order in which a consumer finished things.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

from sluice.pipeline.errors import MessageError
from sluice.pipeline.queue.live_jobs import JobEvent
from sluice.pipeline.wire.messages import DeadLetter, SequenceResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, from_wire, to_wire

SequenceState = Literal["handed_on", "dropped", "dead"]
STATES: tuple[SequenceState, ...] = ("handed_on", "dropped", "dead")
TEXT_CHARS = 160
R = TypeVar("R")
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)


class SequenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sequence; what a dead one never had is 0, -1 or ""."""

    seq_id: str
    job_id: str  # the group's
    index: int
    group_size: int
    task: str = ""
    state: SequenceState
    reason: str = ""  # why it was dropped or is dead
    at: float  # Unix time when the consumer finished it
    enqueued_at: float = 0.0
    queue_s: float = 0.0
    decode_s: float = 0.0
    worker: str = ""
    backend: str = ""
    attempt: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0  # those that the policy sampled
    version_min: int = -1
    version_max: int = -1
    finish_reason: str = ""
    triggered: bool = False  # a repeat guard ended it
    reward: float | None = None
    metrics: dict[str, float] = {}  # of its sample
    text: str = ""  # its first TEXT_CHARS
    num_turns: int = 1
    step: int | None = None
    trained: Literal["trained", "dropped"] | None = None


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer did with one; arrays have shape (len(sample.token_ids),) or none."""

    seq_id: str
    step: int
    version: int  # of the weights that the step started from
    state: Literal["trained", "dropped"]
    reason: str = ""
    proximal_logprobs: FloatArray = msgspec.field(default_factory=FloatArray)
    proximal_versions: Runs = Runs()


class SequenceDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known about one."""

    row: SequenceRow
    result: SequenceResult | None = None
    sample: TrainingSample | None = None
    letter: DeadLetter | None = None
    trained: Trained | None = None


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One finished group."""

    job_id: str
    task: str = ""
    group_size: int
    enqueued_at: float = 0.0  # Unix time; 0: not known
    at: float
    attempts: int = 0
    sequences: int = 0  # kept in the history
    states: dict[str, int] = {}
    events: list[JobEvent] = []  # of `job` only


class SequenceFilter(msgspec.Struct, frozen=True, kw_only=True):
    """All that is given must hold."""

    search: str = ""  # part of seq_id
    state: str = ""
    finish_reason: str = ""
    worker: str = ""
    task: str = ""
    version: int | None = None  # some token was sampled under it, or between two of its tokens' versions
    triggered: bool | None = None
    job_id: str = ""


class Page(msgspec.Struct, Generic[R], frozen=True):
    """Newest first; `next` is the `before` of the page after it, "" at the end."""

    rows: list[R]
    next: str = ""


def pack(value: msgspec.Struct) -> bytes:
    """A struct as stored."""
    return _encoder.encode(value)


def unpack(kind: type[T], raw: bytes) -> T:
    """The counterpart of `pack`; raises MessageError for what does not fit."""
    try:
        return msgspec.msgpack.decode(raw, type=kind, dec_hook=from_wire)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError) as error:
        raise MessageError(f"not a {kind.__name__} of the history: {error}") from error
