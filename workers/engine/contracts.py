"""What the queue worker and the offline engine know of a generation backend; torch-free.

- One `decode` call is one sequence; it joins whatever is running and never changes another sequence's tokens.
- `abort` ends a sequence within one step, and its `decode` returns what there is; cancelling the task that awaits
  `decode` ends it as well, and returns nothing.
- A sequence continues from `so_far` as if it had never stopped: its random numbers belong to positions.
- Per-token arrays of a `SequenceOutput` have one length; logprobs are raw (temperature 1, no truncation).
- `load_weights` comes between two tokens: running sequences keep theirs and continue under the new version; their new
  prefill scores the tokens of the version before (proximal logprobs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import Progress, SamplingParams
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.plugins.base import GenerationPlugin, Hook
from sluice.workers.guard.repeat import RepeatTrigger
from sluice.workers.guard.rules import GuardRules

DecodeEnding = Literal["stop", "length", "repeat_terminated", "deadline", "cancelled"]
"""stop: an end-of-sequence id, a stop id, a stop string or a plugin; length: `max_new_tokens` reached;
repeat_terminated: the repeat guard forced an end of sequence; deadline: out of time; cancelled: `abort` was called."""


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
    supports_vlm: bool = False  # decodes prompts with an image
    hooks: frozenset[Hook] = frozenset()  # plugin hooks that it can call
    repeat_terminate: bool = False  # the repeat guard is loaded
    logprobs_mode: str = "raw_logprobs"  # or processed_logprobs: at the sampling temperature (1 where that is 0)
    flags: tuple[str, ...] = ()  # settings that a reader of the numbers wants to know, e.g. attention=sdpa


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to decode. The tokens depend on (prompt, image, sampling, seed, weights) and nothing else.

    - `report` is called every `report_every` tokens with what is new, from any thread; it must not block.
    - With an image the prompt holds one image placeholder, as the chat template writes it.
    """

    seq_key: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    image: Any = field(default=None, compare=False)  # PIL.Image.Image, RGB
    so_far: SampledTokens | None = None  # continues from there; proximal logprobs are scored anew
    plugins: tuple[GenerationPlugin, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None  # None: those of the model
    pad_token_id: int | None = None  # None: that of the tokenizer
    allowed_token_ids: tuple[int, ...] = ()  # of these alone the next tokens are chosen; empty: of all
    probe_guard: GuardRules | None = None  # instead of the engine's rules, before it serves
    deadline_at: float | None = None  # time.monotonic() seconds; the sequence ends with its next token after it
    report_every: int = 0  # tokens; 0 = never
    report: Callable[[Progress], None] | None = field(default=None, compare=False)
    asked_at: float = field(default=0.0, compare=False)  # Unix seconds

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))
        if not self.prompt_token_ids:
            raise RequestError(f"{self.seq_key}: the prompt is empty; give at least one token")


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """One decoded sequence.

    - `prompt_token_ids` are those that the model saw: an image placeholder is expanded, there is no padding.
    - `sampled` ends with the token that completed the stop (if any); its logprobs are in fp32.
    - `text` has no special tokens, is cut at the earliest stop string and stripped; `raw_text` is whole.
    - `stop_reason`: the stop string, the stop id or the plugin's name; None for end-of-sequence and all else.
    - With a `trigger` the last token is an end-of-sequence id that nobody sampled: logprob 0, version -1, mask 0.
    """

    seq_key: str
    prompt_token_ids: tuple[int, ...]
    sampled: SampledTokens
    text: str
    raw_text: str
    finish_reason: DecodeEnding
    stop_reason: str | int | None = None
    trigger: RepeatTrigger | None = None  # of the repeat guard, if that ended it
    fallback: dict[str, str] = field(default_factory=dict)  # wanted, used, reason: another backend decoded it

    @property
    def token_ids(self) -> list[int]:
        return self.sampled.token_ids

    @property
    def logprobs(self) -> list[float]:
        return self.sampled.logprobs

    @property
    def versions(self) -> list[int]:
        return self.sampled.versions


@dataclass(frozen=True, slots=True)
class GuardTrial:
    """What the loaded repeat guard makes of given tokens, and the rules that it has."""

    rules: GuardRules
    trigger: RepeatTrigger | None  # after the last token


@dataclass(frozen=True, slots=True)
class WeightsProbe:
    """What a version's weights must give: the summed logprob (nats) of `token_ids[1:]`, as the trainer measured it.

    Versions that follow each other score nearly the same, so the change from the version that is loaded is compared
    as well, where it is known: what an engine always computes differently is not in it.
    """

    token_ids: tuple[int, ...]
    score: float
    tolerance: float  # nats, of the sum
    change: float | None = None  # of the trainer's score, from the version that the engine has now
    change_tolerance: float = 0.0  # nats; a quarter of the change comes on top

    def refusal(self, directory: Path, before: float | None, after: float) -> str:
        """Why these are not the weights, or nothing. `before`: the engine's score under those that it had."""
        if not abs(after - self.score) <= self.tolerance:  # NaN is refused
            return f"{directory}: the probe scores {after:.4f}, the trainer measured {self.score:.4f}"
        if before is None or self.change is None:
            return ""
        if abs(after - before - self.change) <= self.change_tolerance + abs(self.change) / 4:
            return ""
        return (
            f"{directory}: the probe went from {before:.5f} to {after:.5f}, the trainer measured a change of "
            f"{self.change:+.5f}: not all weights are the new ones"
        )


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

    def abort(self, seq_key: str) -> None:
        """End the sequences of this key; their `decode` returns what they have, `finish_reason` cancelled."""
        ...

    async def load_weights(self, directory: Path, version: int, probe: WeightsProbe | None = None) -> None:
        """Replace the weights by those of `directory` between two tokens of whatever runs.

        Raises WeightsError with the old version serving: nothing was copied yet, or the old one was loaded back and
        proved. Raises TornWeights if that failed too: running sequences get it, and nothing is decoded until a load
        succeeds.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> float:
        """Summed fp32 logprob (nats) of tokens 1.. given their prefix, under the loaded weights."""
        ...

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        """Show the tokens to a fresh guard of the loaded instance. Raises EngineError if none is loaded."""
        ...

    async def close(self) -> None:
        """End the engine; sequences still running get an EngineError. Safe to call twice."""
        ...

    def progress(self) -> float:
        """`time.monotonic()` seconds of the last completed step, or of now while there is nothing to do."""
        ...
