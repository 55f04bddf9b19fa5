"""What the queue worker and the offline engine know of a generation backend; torch-free.

- One `decode` call is one sequence; it joins whatever is running and never changes another sequence's tokens.
- Cancelling the task that awaits `decode` ends the sequence within one step.
- Per-token arrays of a `SequenceOutput` have one length; logprobs are raw (temperature 1, no truncation).
- `load_weights` happens between sequences: running ones finish, new ones wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pipeline.errors import EngineError, RequestError
from pipeline.messages import SamplingParams

DecodeEnding = Literal["stop", "length", "deadline"]
"""stop: an end-of-sequence id, a stop id or a stop string; length: `max_new_tokens` reached; deadline: out of time."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine is; goes into every result's provenance."""

    name: str  # hf | vllm
    engine_version: str
    device: str
    dtype: str
    model: str  # directory or name it was loaded from
    vocab_size: int  # ids are 0 .. vocab_size - 1
    eos_token_ids: tuple[int, ...]
    context_length: int  # tokens, prompt and generated together


@dataclass(frozen=True, slots=True)
class SequenceSoFar:
    """A piece of a running sequence, from token `offset` on."""

    offset: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to decode. The tokens depend on (prompt, sampling, seed, weights) and nothing else.

    `report` is called every `report_every` tokens with what is new, from any thread; it must not block.
    """

    seq_key: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    deadline_at: float | None = None  # time.monotonic() seconds; the sequence ends with its next token after it
    report_every: int = 0  # tokens; 0 = never
    report: Callable[[SequenceSoFar], None] | None = field(default=None, compare=False)
    asked_at: float = field(default=0.0, compare=False)  # Unix seconds

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))
        if not self.prompt_token_ids:
            raise RequestError(f"{self.seq_key}: the prompt is empty; give at least one token")


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """One decoded sequence.

    `token_ids` end with the token that completed the stop (if any); `logprobs` are natural logs in fp32 under
    `versions`; `text` has no special tokens, is cut at the earliest stop string and stripped; `raw_text` is
    whole.
    `stop_reason`: the stop string or stop id; None for end-of-sequence and for `length`.
    """

    seq_key: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    text: str
    raw_text: str
    finish_reason: DecodeEnding
    stop_reason: str | int | None = None

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.logprobs), len(self.versions))
        if len(set(lengths)) != 1:
            raise EngineError(f"{self.seq_key}: tokens, logprobs and versions differ in length: {lengths}")


class Backend(Protocol):
    """An engine that decodes sequences as they come, batching them itself."""

    @property
    def facts(self) -> EngineFacts:
        """Raises EngineError before `start`."""
        ...

    @property
    def version(self) -> int:
        """Weight version that is loaded now."""
        ...

    async def start(self) -> None:
        """Load the model. Raises ModelError."""
        ...

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """Decode one sequence. Raises RequestError for a bad request, EngineError when the engine failed."""
        ...

    async def load_weights(self, directory: Path, version: int) -> None:
        """Replace the weights by those of `directory`.

        Raises WeightsError; if nothing was copied yet, the old version goes on serving.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> float:
        """Summed fp32 logprob (nats) of tokens 1.. given their prefix, under the loaded weights."""
        ...

    async def close(self) -> None:
        """End the engine; sequences still running get an EngineError. Safe to call twice."""
        ...

    def progress(self) -> float:
        """`time.monotonic()` seconds of the last completed step, or of now while there is nothing to do."""
        ...


def check_request(request: SequenceRequest, facts: EngineFacts) -> None:
    """Raise RequestError unless the engine can decode the request whole.

    The rule for length: prompt + max_new_tokens must fit the context. Nothing is shortened silently.
    """
    key, prompt, limit = request.seq_key, request.prompt_token_ids, facts.context_length
    if len(prompt) >= limit:
        raise RequestError(f"{key}: the prompt has {len(prompt)} tokens, the context is {limit}; shorten it")
    room = limit - len(prompt)
    if request.sampling.max_new_tokens > room:
        raise RequestError(
            f"{key}: max_new_tokens {request.sampling.max_new_tokens} does not fit the context of {limit} "
            f"after a prompt of {len(prompt)} tokens; use at most {room}"
        )
    check_token_ids(key, prompt, facts.vocab_size)
    check_token_ids(f"{key}: stop_token_ids", request.sampling.stop_token_ids, facts.vocab_size)
    if "" in request.sampling.stop:
        raise RequestError(f"{key}: an empty stop string would end every sequence at once; remove it")


def check_token_ids(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError for an id outside 0 .. vocab_size - 1."""
    if not token_ids:
        return
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"{where}: token id {bad} is outside the model's vocabulary 0..{vocab_size - 1}")
