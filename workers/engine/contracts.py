"""What the queue worker and the offline engine know about a generation backend; torch-free.

- One `decode` call is one sequence; it joins the running batch and never changes another sequence's tokens.
- `abort` ends a sequence within one step, and its `decode` returns what was decoded so far. Cancelling the task that
  awaits `decode` ends it too, and returns nothing.
- A sequence continues from `so_far` as if it had never stopped: its random numbers are keyed by position.
- All per-token arrays of a `SequenceOutput` have the same length; logprobs are raw (temperature 1, no truncation). A
  request without `sampling.logprobs` gets the same tokens and no logprobs, and new weights don't score its tokens.
- `load_weights` runs between two tokens: running sequences keep their tokens and continue under the new version. The
  new prefill also scores the previous version's tokens (proximal logprobs). Loads take place in the order of the calls.
- `load_adapter` does that for the sequences of one adapter; all others run on untouched.
- A sequence begins only under a version that its request names, however long it waited for a row. One that has tokens
  continues under any.
- Length rule (`fit_prompt`, `check_request`), before any work: prompt + max_new_tokens must fit the context. A prompt
  is cut only if the request allows it (`truncate_prompt`), always from the left, and the result says by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import Progress, SamplingParams
from sluice.pipeline.wire.sampled_tokens import Ranked, SampledTokens
from sluice.workers.engine.plugins.base import GenerationPlugin, Hook
from sluice.workers.guard.repeat import RepeatTrigger
from sluice.workers.guard.rules import GuardRules

DecodeEnding = Literal["stop", "length", "repeat_terminated", "deadline", "cancelled"]
"""stop: an end-of-sequence id, a stop id, a stop string or a plugin; length: `max_new_tokens` reached;
repeat_terminated: the repeat guard forced an end of sequence; deadline: out of time; cancelled: `abort` was called."""


class WrongVersion(RequestError):
    """The loaded weights may not begin this sequence; `too_old`: newer ones may."""

    def __init__(self, message: str, *, too_old: bool) -> None:
        super().__init__(message)
        self.too_old = too_old


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Describes the engine; stored in every result's provenance."""

    name: str  # hf | vllm
    engine_version: str
    device: str
    dtype: str
    model: str  # directory or name it was loaded from
    vocab_size: int  # ids are 0 .. vocab_size - 1
    eos_token_ids: tuple[int, ...]
    context_length: int  # tokens, prompt and generated together
    supports_vlm: bool = False  # decodes prompts with images
    hooks: frozenset[Hook] = frozenset()  # plugin hooks it can call
    repeat_terminate: bool = False  # the repeat guard is loaded
    logprobs_mode: str = "raw_logprobs"  # or processed_logprobs: at the sampling temperature (1 where that is 0)
    grammars: str = ""  # the library that derives their masks, with its version; empty: not installed
    keeps_cache: bool = False  # of running sequences over new weights: their logprobs are those of no one version
    flags: tuple[str, ...] = ()  # settings that matter when reading the numbers, e.g. attention=sdpa


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to decode. The tokens depend on (prompt, images, sampling, seed, weights) only.

    - `report` is called every `report_every` tokens with the new ones, from any thread; it must not block.
    - The prompt holds one placeholder for each image, in their order, as the chat template writes it; a placeholder may
      be expanded already, as in an output's `prompt_token_ids`.
    """

    seq_key: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    images: tuple[Any, ...] = field(default=(), compare=False)  # PIL.Image.Image, RGB
    so_far: SampledTokens | None = None  # continues from there; proximal logprobs are scored again
    plugins: tuple[GenerationPlugin, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None  # None: the model's
    pad_token_id: int | None = None  # None: the tokenizer's
    allowed_token_ids: tuple[int, ...] = ()  # the next tokens are chosen only from these; empty: from all
    probe_guard: GuardRules | None = None  # replaces the engine's rules; before it serves
    deadline_at: float | None = None  # time.monotonic() seconds; the sequence ends with its next token after this
    report_every: int = 0  # tokens; 0 = never
    report: Callable[[Progress], None] | None = field(default=None, compare=False)
    asked_at: float = field(default=0.0, compare=False)  # Unix seconds
    adapter: str = ""  # decoded under this adapter's newest version; empty: under the policy's
    first_under: tuple[int, int | None] = (0, None)  # lowest and highest version that may sample its first token
    goes_on: bool = field(default=False, compare=False)  # a turn: it begins with kept tokens, and its own are kept

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))
        object.__setattr__(self, "images", tuple(self.images))
        if not self.prompt_token_ids:
            raise RequestError(f"{self.seq_key}: the prompt is empty; give at least one token")


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """One decoded sequence.

    - `prompt_token_ids` are the ids the model saw: image placeholders expanded, no padding.
    - `sampled` ends with the token that completed the stop (if any); its logprobs are fp32.
    - `text` has no special tokens, is cut at the earliest stop string and stripped; `raw_text` is complete.
    - `stop_reason`: the stop string, the stop id or the plugin's name; None for end-of-sequence and everything else.
    - With a `trigger`, the last token is a forced, unsampled end-of-sequence id: logprob 0, version -1, mask 0.
    """

    seq_key: str
    prompt_token_ids: tuple[int, ...]
    sampled: SampledTokens
    text: str
    raw_text: str
    finish_reason: DecodeEnding
    stop_reason: str | int | None = None
    trigger: RepeatTrigger | None = None  # the repeat guard's, if that ended it
    first_token_at: float = field(default=0.0, compare=False)  # Unix seconds; 0: none was decoded
    fallback: dict[str, str] = field(default_factory=dict)  # wanted, used, reason: set if another backend decoded it
    prompt_ranked: Ranked | None = None  # of the prompt's tokens after the first, where the request asks
    cached_tokens: int = field(default=0, compare=False)  # of the prompt, that came from a cache instead of a prefill

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
    """How the loaded repeat guard reacts to given tokens, and its rules."""

    rules: GuardRules
    trigger: RepeatTrigger | None  # after the last token


@dataclass(frozen=True, slots=True)
class WeightsProbe:
    """What a version's weights must score: the summed logprob (nats) of `token_ids[1:]`, as the trainer measured it.

    Consecutive versions score nearly the same. Where the change from the loaded version is known, it is compared too:
    it cancels out whatever an engine always computes differently.
    """

    token_ids: tuple[int, ...]
    score: float
    tolerance: float  # nats, of the sum
    change: float | None = None  # of the trainer's score, from the version the engine has now
    change_tolerance: float = 0.0  # nats; a quarter of the change is added

    def refusal(self, directory: Path, before: float | None, after: float) -> str:
        """Why these are the wrong weights; empty if they match. `before`: the score under the previous weights."""
        if not abs(after - self.score) <= self.tolerance:  # NaN is refused
            return f"{directory}: the probe scores {after:.4f}, but the trainer measured {self.score:.4f}"
        if before is None or self.change is None:
            return ""
        if abs(after - before - self.change) <= self.change_tolerance + abs(self.change) / 4:
            return ""
        return (
            f"{directory}: the probe went from {before:.5f} to {after:.5f}, but the trainer measured a change of "
            f"{self.change:+.5f}: not all weights are new"
        )


class Backend(Protocol):
    """An engine that decodes sequences as they arrive and batches them itself."""

    @property
    def facts(self) -> EngineFacts:
        """Raises EngineError before `start`."""
        ...

    @property
    def version(self) -> int:
        """Of the policy."""
        ...

    @property
    def versions(self) -> Mapping[str, int]:
        """The version of each loaded adapter by name, and the policy's under ""."""
        ...

    @property
    def images_processed(self) -> int:
        """How many images went through the processor; those that its cache answered don't count."""
        ...

    async def start(self) -> None:
        """Load the model. Raises ModelError."""
        ...

    async def decode(self, request: SequenceRequest) -> SequenceOutput:
        """Decode one sequence.

        Raises RequestError for a bad request, WrongVersion for one that these weights may not begin, EngineError if the
        engine failed.
        """
        ...

    def abort(self, seq_key: str) -> None:
        """End the sequences of this key; their `decode` returns what they have, with `finish_reason` cancelled."""
        ...

    async def load_weights(
        self, directory: Path, version: int, probe: WeightsProbe | None = None, parent: int | None = None
    ) -> None:
        """Replace the weights with those of `directory`, between two tokens of the running sequences.

        `parent`: the version that `version` was published from, whose tokens get their proximal logprob; None: the
        number before.

        Raises WeightsError if the old version still serves: nothing was copied, or the old weights were loaded back and
        proved. Raises TornWeights if that failed too: running sequences get it, and nothing is decoded until a load
        succeeds.
        """
        ...

    async def load_adapter(
        self,
        name: str,
        directory: Path,
        version: int = 0,
        probe: WeightsProbe | None = None,
        parent: int | None = None,
    ) -> None:
        """Decode the sequences of this adapter under `version` of it from now on, beside the engine's weights.

        Raises WeightsError: all policies are as before. An engine that started without `AdapterRoom` refuses it.
        """
        ...

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> float:
        """Summed fp32 logprob (nats) of tokens 1.. given their prefix, under the policy or an adapter."""
        ...

    async def try_guard(self, token_ids: Sequence[int]) -> GuardTrial:
        """Feed the tokens to a fresh guard of the loaded instance. Raises EngineError if none is loaded."""
        ...

    async def close(self) -> None:
        """End the engine; running sequences get an EngineError. Safe to call twice."""
        ...

    def progress(self) -> float:
        """`time.monotonic()` seconds of the last completed step, or now while idle."""
        ...


_PLAIN = SamplingParams()


def fit_prompt(
    where: str, prompt: Sequence[int], sampling: SamplingParams, facts: EngineFacts
) -> tuple[list[int], int]:
    """(prompt, number of tokens cut from its left); cuts only with `truncate_prompt`.

    Raises RequestError when `max_new_tokens` leaves no room for a prompt.
    """
    if not sampling.truncate_prompt:
        return list(prompt), 0
    room = facts.context_length - sampling.max_new_tokens
    if room < 1:
        raise RequestError(
            f"{where}: max_new_tokens {sampling.max_new_tokens} leaves no room for a prompt in the context of "
            f"{facts.context_length}; use at most {facts.context_length - 1}"
        )
    cut = max(0, len(prompt) - room)
    return list(prompt[cut:]), cut


def check_request(request: SequenceRequest, facts: EngineFacts, prompt: Sequence[int]) -> None:
    """Raise RequestError unless the engine can decode the request whole; `prompt` is what the model will see."""
    key, limit, wanted = request.seq_key, facts.context_length, request.sampling.max_new_tokens
    if len(prompt) >= limit and request.images:
        raise RequestError(
            f"{key}: the prompt has {len(prompt)} tokens ({len(request.prompt_token_ids)} before its "
            f"{len(request.images)} images were expanded), the context is {limit}; send fewer or smaller images, or "
            "lower model.preprocess.max_pixels if the model has it (a prompt with images is never cut)"
        )
    if len(prompt) >= limit:
        raise RequestError(
            f"{key}: the prompt has {len(prompt)} tokens, the context is {limit}; shorten it, or set truncate_prompt"
        )
    room = limit - len(prompt)
    if wanted > room:
        raise RequestError(
            f"{key}: max_new_tokens {wanted} does not fit the context of {limit} "
            f"after a prompt of {len(prompt)} tokens; use at most {room} (sampling.max_new_tokens)"
        )
    check_token_ids(key, prompt, facts.vocab_size)
    check_token_ids(f"{key}: stop_token_ids", request.sampling.stop_token_ids, facts.vocab_size)
    check_token_ids(f"{key}: eos_token_ids", request.eos_token_ids or (), facts.vocab_size)
    check_token_ids(
        f"{key}: pad_token_id", () if request.pad_token_id is None else (request.pad_token_id,), facts.vocab_size
    )
    check_token_ids(f"{key}: allowed_token_ids", request.allowed_token_ids, facts.vocab_size)
    check_token_ids(f"{key}: allowed_token_ids", request.sampling.allowed_token_ids, facts.vocab_size)
    check_token_ids(f"{key}: logit_bias", list(request.sampling.logit_bias), facts.vocab_size)
    if facts.repeat_terminate and request.eos_token_ids is not None and not request.eos_token_ids:
        raise RequestError(
            f"{key}: ignore_eos cannot be combined with repeat_terminate, which ends loops with an end-of-sequence id; "
            "leave eos_token_ids out, or switch the guard off"
        )
    sampling = request.sampling
    if facts.logprobs_mode != "raw_logprobs" and (
        sampling.top_p < 1 or sampling.top_k or sampling.min_p or sampling.reshapes(_PLAIN)
    ):
        raise RequestError(
            f"{key}: {facts.logprobs_mode} supports a temperature, but no top_p, top_k, min_p, penalty or constraint: "
            "under other weights a token they exclude has no logprob; remove them, or use raw logprobs"
        )
    if "" in request.sampling.stop:
        raise RequestError(f"{key}: an empty stop string would end every sequence immediately; remove it")
    if request.so_far is not None:
        if sampling.logprobs and len(request.so_far) and not request.so_far.logprobs:
            raise RequestError(f"{key}: its tokens so far have no logprobs, which are asked for; start anew")
        check_token_ids(f"{key}: so_far", request.so_far.token_ids, facts.vocab_size)


def check_start(request: SequenceRequest, version: int) -> None:
    """Raise WrongVersion unless this version may sample the first token."""
    least, most = request.first_under
    if version < least:
        raise WrongVersion(f"{request.seq_key}: it needs weights v{least}, but v{version} is loaded", too_old=True)
    if most is not None and version > most:
        raise WrongVersion(
            f"{request.seq_key}: it accepts weights up to v{most}, but v{version} is loaded", too_old=False
        )


def check_scored(token_ids: Sequence[int], facts: EngineFacts) -> None:
    """Raise RequestError unless these tokens can be scored."""
    if len(token_ids) < 2:
        raise RequestError(f"a score needs at least 2 tokens, got {len(token_ids)}")
    check_token_ids("score", token_ids, facts.vocab_size)
    if len(token_ids) >= facts.context_length:
        raise RequestError(f"a score needs less than {facts.context_length} tokens, got {len(token_ids)}")


def check_token_ids(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError for an id outside 0 .. vocab_size - 1."""
    if not token_ids:
        return
    if (odd := next((token for token in token_ids if not isinstance(token, int)), None)) is not None:
        raise RequestError(f"{where}: a token id is a whole number, not {odd!r}")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"{where}: token id {bad} is outside the model's vocabulary 0..{vocab_size - 1}")
