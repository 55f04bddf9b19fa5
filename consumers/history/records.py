"""The types that history readers get.

- A row is for lists; a detail is the whole sequence. `step` and `trained` come from the trainer's file, joined on
  reading.
- `at` never decreases within one file: sorting by it gives the order in which a consumer finished things.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from sluice.consumers.tasks.segments import LeftOut
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
    """One finished sequence; fields that a dead one never had are 0, -1 or ""."""

    seq_id: str
    job_id: str  # the group's
    index: int
    group_size: int
    task: str = ""
    state: SequenceState
    reason: str = ""  # why it was dropped or died
    at: float  # Unix time when the consumer finished it
    enqueued_at: float = 0.0
    committed_at: float = 0.0  # Unix time of the broker
    queue_s: float = 0.0
    decode_s: float = 0.0
    worker: str = ""
    backend: str = ""
    attempt: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0  # tokens that the policy sampled
    version_min: int = -1
    version_max: int = -1
    finish_reason: str = ""
    triggered: bool = False  # a repeat guard stopped it
    reward: float | None = None
    reward_parts: dict[str, float] = {}  # of your reward functions, unweighted, by name
    metrics: dict[str, float] = {}  # from its sample
    text: str = ""  # the first TEXT_CHARS
    num_turns: int = 1
    step: int | None = None
    trained: Literal["trained", "dropped"] | None = None


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer did with one sequence; arrays have shape (len(sample.token_ids),) or are absent."""

    seq_id: str
    step: int
    version: int  # weights that the step started from
    state: Literal["trained", "dropped"]
    reason: str = ""
    handed_at: float = 0.0  # Unix time of the broker when the consumer handed it to the trainer
    proximal_logprobs: FloatArray = msgspec.field(default_factory=FloatArray)
    proximal_versions: Runs = Runs()
    response_mask: Runs = Runs()  # absent in records of older releases
    left_out: Runs = Runs()


class SequenceDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about one sequence."""

    row: SequenceRow
    result: SequenceResult | None = None
    sample: TrainingSample | None = None
    letter: DeadLetter | None = None
    trained: Trained | None = None

    @property
    def as_trained(self) -> TrainingSample | None:
        """The sample with its step's masks, weights and proximal logprobs; as handed on where those aren't known."""
        sample, step = self.sample, self.trained
        if sample is None or step is None:
            return sample
        count, known = len(sample.token_ids), dict[str, Any]()
        if len(step.proximal_logprobs) == len(step.proximal_versions) == count:
            known |= {"proximal_logprobs": step.proximal_logprobs, "proximal_versions": step.proximal_versions}
        if len(step.response_mask) == count:
            codes = step.left_out.expand() or [LeftOut.no] * count
            weights = [0.0 if code == LeftOut.stale else each for each, code in zip(sample.weights, codes, strict=True)]
            known |= {
                "response_mask": step.response_mask,
                "left_out": step.left_out,
                "weights": FloatArray(weights),
            }
        return replace(sample, **known)


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One finished group."""

    job_id: str
    task: str = ""
    group_size: int
    enqueued_at: float = 0.0  # Unix time; 0: unknown
    at: float
    attempts: int = 0
    sequences: int = 0  # number kept in the history
    states: dict[str, int] = {}
    events: list[JobEvent] = []  # set by `job` only


class SequenceFilter(msgspec.Struct, frozen=True, kw_only=True):
    """All given conditions must hold."""

    search: str = ""  # substring of seq_id
    state: str = ""
    finish_reason: str = ""
    worker: str = ""
    task: str = ""
    version: int | None = None  # some token was sampled under it, or between the versions of two tokens
    triggered: bool | None = None
    job_id: str = ""


class Page(msgspec.Struct, Generic[R], frozen=True):
    """Newest first; `next` is the `before` of the next page, "" at the end."""

    rows: list[R]
    next: str = ""


def pack(value: msgspec.Struct) -> bytes:
    """A struct as stored."""
    return _encoder.encode(value)


def unpack(kind: type[T], raw: bytes) -> T:
    """The inverse of `pack`; raises MessageError if the bytes don't fit the type."""
    try:
        return msgspec.msgpack.decode(raw, type=kind, dec_hook=from_wire)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError) as error:
        raise MessageError(f"not a {kind.__name__} of the history: {error}") from error
