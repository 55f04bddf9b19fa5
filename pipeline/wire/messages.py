"""Every message that crosses a process boundary.

- Parallel per-token arrays are length-checked at construction; an empty array means "not stamped".
- Each field says who stamps it: [P]roducer, [W]orker, [C]onsumer, [T]rainer, [Q]ueue scripts.
- An agent rollout is one sequence of the run from its opening to its end, and then as many as its history has ends. A
  turn names the turn that it follows: a caller may rewrite or branch the history, and nothing of it is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any, Literal

import msgspec

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.codec import SCHEMA, Wire, check_time, decode, encode, lone_surrogate
from sluice.pipeline.wire.sampled_tokens import Ranked, SampledTokens, check_columns, check_ranked
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray, check_lengths

__all__ = ["SCHEMA", "Wire", "decode", "encode"]

MAX_PRIORITY = 1000
MAX_DEADLINE_S = 1e9
_COLDEST = 1e-5  # a lower one is greedy in effect, and the lowest make logits / temperature overflow
MAX_GROUP = 65_536  # sequences of one prompt
MOST_VERSION = 2**31 - 1  # of the weights
EVALUATION = "evaluation"  # the mailbox of the run's evaluator
NO_LOGPROBS = "none"  # the `logprobs_mode` of a result that has none
REFERENCE_DIRECTORY = -2  # in the place of a version: the weights of the directory that policy.kl_reference names
VERSION_GONE = "version_gone"  # why a pinned job ended: its version isn't registered

FinishReason = Literal["stop", "length", "repeat_terminated", "deadline", "cancelled", "error"]
CUT_SHORT: frozenset[FinishReason] = frozenset({"deadline", "cancelled", "error"})
"""Ended from outside: not the model's own ending, so nothing of the sequence is trained."""
Message = dict[str, Any]


GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
MAX_GRAMMAR = 65_536  # characters
MAX_LISTED = 1024  # ids, words and biases of one request
MAX_STOP = 8192  # characters of all stop texts: a stream compares each with its text, step by step
MAX_ALTERNATIVES = 20


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of a sequence must match. [P]"""

    kind: GrammarKind
    text: str = ""  # the JSON schema, regex, list of texts as JSON, EBNF or structural tag; empty for json_object

    def __post_init__(self) -> None:
        if bool(self.text) == (self.kind == "json_object"):
            raise ValueError(f"grammar: text must be {'empty' if self.text else 'given'} for {self.kind}")
        if len(self.text) > MAX_GRAMMAR:
            raise ValueError(f"grammar: text has {len(self.text)} characters; at most {MAX_GRAMMAR}")
        if problem := lone_surrogate(self.text, "grammar"):
            raise ValueError(problem)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a sequence is sampled; part of the job id, so a change makes new jobs. [P]"""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 = off
    min_p: float = 0.0  # of the best token's probability; 0 = off
    repetition_penalty: float = 1.0  # of tokens in prompt and answer; 1 = off
    presence_penalty: float = 0.0  # nats off each token that the answer has; 0 = off
    frequency_penalty: float = 0.0  # nats off a token, for each time that the answer has it; 0 = off
    logit_bias: dict[int, float] = {}  # token id -> nats added
    allowed_token_ids: tuple[int, ...] = ()  # no others are sampled; empty = all
    bad_words: tuple[str, ...] = ()  # never completed
    grammar: Grammar | None = None  # the answer matches it
    logprobs: bool = True  # of the sampled tokens; False: not computed, and the sequence is never trained
    top_logprobs: int | None = None  # likeliest tokens reported beside each sampled one, with its rank; None = neither
    prompt_logprobs: int | None = None  # the same of the prompt's tokens; None = nothing of the prompt
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # None: derived from (run seed, job_id, index)
    truncate_prompt: bool = False  # cut a prompt that is too long from the left; else it is an error

    def __post_init__(self) -> None:
        penalty, cold = self.repetition_penalty, 0 < self.temperature < _COLDEST
        size = sum(map(len, self.stop))
        checks = (
            (0 <= self.temperature < math.inf, "temperature must be >= 0 and finite", self.temperature),
            (not cold, f"temperature must be 0 (greedy) or >= {_COLDEST}", self.temperature),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p),
            (self.top_k >= -1, "top_k must be >= -1 (0 and -1 = off)", self.top_k),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p),
            (0.001 <= penalty <= 1000, "repetition_penalty must be in 0.001..1000", penalty),
            (-2 <= self.presence_penalty <= 2, "presence_penalty must be in -2..2", self.presence_penalty),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty must be in -2..2", self.frequency_penalty),
            (_few(self.logit_bias), f"logit_bias must have at most {MAX_LISTED} ids", len(self.logit_bias)),
            (_biases(self.logit_bias), "logit_bias must be in -100..100", self.logit_bias),
            (_few(self.bad_words), f"bad_words must have at most {MAX_LISTED} words", len(self.bad_words)),
            (_few(self.stop), f"stop must have at most {MAX_LISTED} texts", len(self.stop)),
            (size <= MAX_STOP, f"stop must have at most {MAX_STOP} characters in all", size),
            (_few(self.stop_token_ids), f"stop_token_ids must have at most {MAX_LISTED} ids", len(self.stop_token_ids)),
            (_listed(self.top_logprobs), f"top_logprobs must be in 0..{MAX_ALTERNATIVES}", self.top_logprobs),
            (_listed(self.prompt_logprobs), f"prompt_logprobs must be in 0..{MAX_ALTERNATIVES}", self.prompt_logprobs),
            (self.logprobs or self.top_logprobs is None, "top_logprobs needs logprobs", self.top_logprobs),
            (all(word.strip() for word in self.bad_words), "bad_words must not be blank", list(self.bad_words)),
            (self.max_new_tokens >= 1, "max_new_tokens must be >= 1", self.max_new_tokens),
        )
        for holds, rule, value in checks:
            if not holds:
                raise ValueError(f"{rule}, got {value}")
        for name in ("stop", "bad_words"):
            if problem := lone_surrogate(getattr(self, name), name):
                raise ValueError(problem)
        if self.top_k == -1:  # vLLM's word for off; one value here, as it is part of the job id
            msgspec.structs.force_setattr(self, "top_k", 0)

    def reshapes(self, usual: SamplingParams) -> bool:
        """Whether other tokens are favoured than with `usual`: by a grammar, a list of ids or words, or a penalty.

        Temperature, top-p, top-k and min-p keep the order of the tokens.
        """
        return any(getattr(self, name) != getattr(usual, name) for name in RESHAPING)


RESHAPING = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "grammar",
)
"""Of the sampling parameters, those that change which tokens are favoured."""


def _few(listed: Sized) -> bool:
    return len(listed) <= MAX_LISTED


def _biases(biases: dict[int, float]) -> bool:
    return all(-100 <= bias <= 100 for bias in biases.values())


def _listed(count: int | None) -> bool:
    return count is None or 0 <= count <= MAX_ALTERNATIVES


class ImageRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image by reference; its bytes never go through the queue. A digest given with a path or URL is checked. [P]"""

    path: str | None = None
    url: str | None = None
    sha256: str | None = None

    @classmethod
    def of(cls, reference: str) -> ImageRef:
        """`https://…` and `http://…` are URLs, `sha256:…` is a digest, all else is a path."""
        if reference.lower().startswith(("http://", "https://")):
            return cls(url=reference)
        return cls(sha256=reference[7:]) if reference.startswith("sha256:") else cls(path=reference)


class DecodeJob(Wire, frozen=True, kw_only=True, tag="decode_job"):
    """Decode one prompt `n` times. Everything [P]."""

    run: str
    job_id: str  # deterministic: run + hash(source row, epoch, sampling, n)
    n: int = 1
    messages: list[Message] = []  # either messages or prompt_token_ids
    prompt_token_ids: TokenArray = msgspec.field(default_factory=TokenArray)
    images: list[ImageRef] = []
    sampling: SamplingParams = SamplingParams()
    truth: Any = None  # opaque to everything but the task
    task: str = "detection"
    priority: int = 0  # 0 to 1000, higher goes first
    deadline_s: float | None = None  # seconds after enqueue; None = no deadline
    min_weight_version: int = 0
    max_weight_version: int | None = None
    pinned_version: int | None = None  # decoded wholly under this one: a worker loads it, and keeps it until the end
    adapter: str = ""  # of worker.adapters, which decodes it; its tokens are no samples of the policy, so with reply_to
    rollout_id: str | None = None  # agent rollouts only
    turn: int | None = None  # of the rollout, from 0
    reply_to: str | None = None  # the asking caller's mailbox: results go there, never into the training stream
    seeded: bool = False  # the caller chose sampling.seed: the tokens depend on it and the index, not on the job's id
    stream_every: int = 0  # tokens between two TokenDeltas to the caller; 0 = none
    trace: dict[str, str] = {}  # W3C trace context: the parent of what is done for it
    metadata: dict[str, Any] = {}
    keep_messages: bool = False  # results carry the messages: for reward functions

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_GROUP:
            raise MessageError(f"job {self.job_id}: n must be in 1..{MAX_GROUP}, got {self.n}")
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise MessageError(f"job {self.job_id}: priority must be in 0..{MAX_PRIORITY}, got {self.priority}")
        if self.deadline_s is not None and not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise MessageError(
                f"job {self.job_id}: deadline_s must be in 0..{MAX_DEADLINE_S:.0f}, got {self.deadline_s}"
            )
        if self.adapter and (not self.reply_to or self.rollout_id or self.pinned_version is not None):
            raise MessageError(
                f"job {self.job_id}: adapter {self.adapter!r} needs reply_to, and takes no rollout_id or "
                "pinned_version: only the policy's own sequences are trained and versioned by the run"
            )
        if not self.sampling.logprobs and (not self.reply_to or self.rollout_id):
            raise MessageError(
                f"job {self.job_id}: sampling.logprobs false needs reply_to, and takes no rollout_id: without them "
                "nothing of its sequences can be trained"
            )
        if bool(self.messages) == bool(len(self.prompt_token_ids)):
            raise MessageError(f"job {self.job_id}: give either messages or prompt_token_ids")
        texts = {"messages": self.messages, "images": self.images, "truth": self.truth, "metadata": self.metadata}
        if problem := lone_surrogate(texts, ""):
            raise MessageError(f"job {self.job_id}: {problem}")


class Reshaped(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were drawn from another distribution than the run's: their logprobs are raw all the same. [W]

    A grammar's masks follow from it, the tokenizer and the tokens from `start` on.
    """

    start: int  # of the sequence's tokens; in a training sample of all tokens
    end: int
    sampling: SamplingParams  # as in effect
    library: str = ""  # that derived the grammar's masks, with its version


class SequenceResult(Wire, frozen=True, kw_only=True, tag="sequence_result"):
    """One decoded sequence. Arrays run over everything after the first prompt: shape (len(token_ids),)."""

    seq_id: str  # [W] job_id:index
    group_id: str  # [W] job_id of the prompt's group
    group_size: int  # [W]
    index: int  # [W]
    rollout_id: str | None = None  # [P] agent rollouts only
    turn: int | None = None  # [P] of the rollout; for a whole trajectory: its number of turns
    reply_to: str | None = None  # [P] carried through
    part: int = 0  # [P] for a rollout with a forked history: number of this trajectory, of `parts`
    parts: int = 1  # [P]
    reward: float | None = None  # [P] of the whole rollout, from the agent's side; None: the task decides
    attempt: int = 1  # [W] fencing number of the attempt that committed it
    worker: str = ""  # [W]
    adapter: str = ""  # [P] that decoded it, and whose versions these are; empty: the policy
    backend: str = ""  # [W] hf | vllm
    engine_version: str = ""  # [W]
    prompt_token_ids: TokenArray  # [W] as the model saw them: image placeholders expanded, no padding
    prompt_truncated: int = 0  # [W] tokens cut from its left
    token_ids: TokenArray  # [W] int32
    cached_tokens: int = 0  # [W] of the prompt, not prefilled anew: an earlier sequence had left them in a cache
    resumed_tokens: int = 0  # [W] how many of these an earlier attempt decoded and stored
    response_mask: Runs = Runs()  # [W] 1 = sampled by the policy; empty = all ones
    logprobs: FloatArray  # [W] nats, of each token under versions[i]; empty where `logprobs_mode` is none
    versions: Runs  # [W] weight version that sampled each token; -1 where the mask is 0
    proximal_logprobs: FloatArray = msgspec.field(default_factory=FloatArray)  # [W] empty = none scored yet
    proximal_versions: Runs = Runs()  # [W] the version after versions[i], or -1 = not scored; empty = all -1
    text: str = ""  # [W] cleaned
    raw_text: str = ""  # [W] with special tokens, never truncated
    finish_reason: FinishReason  # [W]
    stop_reason: str | int | None = None  # [W] the string, id, plugin or rule that ended the sequence
    triggers: dict[str, Any] = {}  # [W] repeat_terminate: 0|1, rule, at_token
    logprobs_mode: str = "raw_logprobs"  # [W] raw: temperature 1; processed_logprobs: the sampling's; none: not asked
    keeps_cache: bool = False  # [W] weights.keep_cache: after a change of weights, logprobs are of a stale cache
    sampling: SamplingParams = SamplingParams()  # [W] as in effect
    ranked: Ranked | None = None  # [W] of each token, where sampling.top_logprobs asks; None: of none
    prompt_ranked: Ranked | None = (
        None  # [W] of the prompt's tokens after the first, where sampling.prompt_logprobs asks
    )
    reshaped: list[Reshaped] = []  # [W] tokens drawn under a grammar, a list or a penalty that the run doesn't have
    timings: dict[str, float] = {}  # [W] seconds: queue_s, images_s, first_token_s, decode_s, behind_s; Unix: *_at
    trace: dict[str, str] = {}  # [P] carried through
    truth: Any = None  # [P] carried through
    images: list[ImageRef] = []  # [P] of the prompt, in its order; [W] sha256 of the bytes that were decoded
    task: str = "detection"  # [P]
    metadata: dict[str, Any] = {}  # [P] carried through
    messages: list[Message] = []  # [P] of the prompt, carried through where a run has a reward function

    def __post_init__(self) -> None:
        check_columns(self.seq_id, self, scored=self.has_logprobs)
        check_ranked(self.seq_id, self.ranked, len(self.token_ids))

    @property
    def has_logprobs(self) -> bool:
        """Whether its tokens' logprobs were asked for; without them nothing of it is trained."""
        return self.logprobs_mode != NO_LOGPROBS

    @property
    def sampled(self) -> SampledTokens:
        """Its per-token arrays as lists."""
        return SampledTokens(
            list(self.token_ids),
            list(self.logprobs),
            list(self.versions),
            list(self.response_mask),
            list(self.proximal_logprobs),
            list(self.proximal_versions),
        )


class Progress(Wire, frozen=True, kw_only=True, tag="progress"):
    """[W] A piece of a running sequence, from token `offset` on; a redelivered job can continue from it."""

    offset: int
    token_ids: TokenArray
    logprobs: FloatArray  # nats, of each token under versions[i]; empty where nobody asked for them
    versions: Runs
    ranked: Ranked | None = None

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        check_lengths("progress", count, optional=True, logprobs=self.logprobs)
        check_lengths("progress", count, versions=self.versions)
        check_ranked("progress", self.ranked, len(self.token_ids))

    @classmethod
    def of(cls, offset: int, tokens: SampledTokens) -> Progress:
        """Mask and proximal logprobs stay behind: whoever continues the sequence scores it again."""
        columns = tokens.columns()
        kept = {name: columns[name] for name in ("token_ids", "logprobs", "versions")}
        return cls(offset=offset, **kept, ranked=tokens.as_ranked())

    @property
    def sampled(self) -> SampledTokens:
        """Its per-token arrays as lists."""
        ranked = [] if self.ranked is None else self.ranked.places()
        return SampledTokens(list(self.token_ids), list(self.logprobs), list(self.versions), ranked=ranked)


class ScoreJob(Wire, frozen=True, kw_only=True, tag="score_job"):
    """Score given tokens under one retained weight version; repeatable. [T]"""

    run: str
    seq_id: str
    prompt_token_ids: TokenArray
    token_ids: TokenArray
    positions: TokenArray  # indices into token_ids
    sampled: Runs = Runs()  # of token_ids: 1 where the policy wrote it, under any version; empty: at positions
    images: list[ImageRef] = []  # in the order of their placeholders in both, with the digests the worker stamped
    version: int  # REFERENCE_DIRECTORY: none of the run's
    temperature: float = 1.0  # of the scores
    reply_to: str = ""  # the asking trainer's nonce
    trace: dict[str, str] = {}  # of the step that asks
    expires_at: float = 0.0  # Unix time after which the answer is no longer needed; 0 = never

    def __post_init__(self) -> None:
        check_lengths(self.seq_id, len(self.token_ids), optional=True, sampled=self.sampled)


class ScoreResult(Wire, frozen=True, kw_only=True, tag="score_result"):
    """[W] logprobs[k] is that of token_ids[positions[k]] under `scored_version`."""

    seq_id: str
    scored_version: int
    positions: TokenArray
    logprobs: FloatArray
    error: str = ""  # why there are no scores (the version is retired, damaged, …); then both arrays are empty

    def __post_init__(self) -> None:
        check_lengths(self.seq_id, len(self.positions), logprobs=self.logprobs)


class TokenDelta(Wire, frozen=True, kw_only=True, tag="token_delta"):
    """[W] New tokens of one sequence, for streaming callers."""

    seq_id: str
    offset: int
    token_ids: TokenArray
    logprobs: FloatArray  # empty where nobody asked for them
    text: str = ""
    finish_reason: FinishReason | None = None
    ranked: Ranked | None = None

    def __post_init__(self) -> None:
        check_lengths(self.seq_id, len(self.token_ids), optional=True, logprobs=self.logprobs)
        check_ranked(self.seq_id, self.ranked, len(self.token_ids))


class GeometryTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One box to regress: `positions` are the 4 input positions of its coordinate tokens. [C]"""

    positions: tuple[int, int, int, int]
    box: tuple[int, int, int, int]  # xyxy, 0-999


class TrainingSample(Wire, frozen=True, kw_only=True, tag="training_sample"):
    """What the trainer sees of one sequence; every per-token array has shape (len(token_ids),). [C]

    `labels[i]` is the target at input position i, predicted from positions < i; it may differ from
    `token_ids[i]` (truth labels on a sampled prefix). `weights[i]` 0 switches position i off.
    """

    seq_id: str
    group_id: str
    task: str
    token_ids: TokenArray  # prompt + target
    labels: TokenArray
    weights: FloatArray  # cross-entropy weight
    segments: Runs  # codes of `Segment`
    prompt_len: int
    images: list[ImageRef] = []  # in the order of their placeholders in token_ids, with the digests the worker stamped
    geometry: list[GeometryTarget] = []
    logprobs: FloatArray = msgspec.field(default_factory=FloatArray)  # behaviour; 0 outside the rollout
    temperature: float = 1.0  # of every logprob here: not 1 if the worker's logprobs_mode is processed
    keeps_cache: bool = False  # the worker's: logprobs after a change of `versions` are of a stale cache
    versions: Runs = Runs()  # -1 outside the rollout
    proximal_logprobs: FloatArray = msgspec.field(default_factory=FloatArray)
    proximal_versions: Runs = Runs()
    response_mask: Runs = Runs()
    reshaped: list[Reshaped] = []  # carried through, behind the prompt
    left_out: Runs = Runs()  # [T] why a sampled token has mask 0, codes of `LeftOut`; empty = no policy loss
    reward: float | None = None
    advantage: float | None = None
    index: int = -1  # place in its group; -1 = not stamped
    parts: int = 1  # of its rollout, this one and dropped ones included; more than 1: a forked history
    group_rewards: int = 0  # number of rewards its advantage was computed from; 0 = none computed
    enqueued_at: float = 0.0  # Unix time, [Q] carried through
    trace: dict[str, str] = {}  # [P] carried through
    metrics: dict[str, float] = {}  # counters of this sample, keys of sluice.pipeline.telemetry.training_metrics

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        check_lengths(self.seq_id, tokens, labels=self.labels, weights=self.weights, segments=self.segments)
        check_columns(self.seq_id, self, stamped=False)
        check_lengths(self.seq_id, tokens, optional=True, left_out=self.left_out)
        if not 0 <= self.prompt_len <= tokens:
            raise MessageError(f"{self.seq_id}: prompt_len {self.prompt_len} outside 0..{tokens}")

    @property
    def sampled(self) -> SampledTokens:
        """Its per-token arrays as lists; where a task stamped none, they are those of tokens that nobody sampled."""
        none = SampledTokens.context(self.token_ids)
        return SampledTokens(
            none.token_ids,
            list(self.logprobs) or none.logprobs,
            list(self.versions) or none.versions,
            list(self.response_mask) or none.response_mask,
            list(self.proximal_logprobs),
            list(self.proximal_versions),
        )


class TrainingBatch(Wire, frozen=True, kw_only=True, tag="training_batch"):
    """Samples handed to the trainer together. [C]; `batch_seq` is the stream's entry order."""

    batch_id: str
    samples: list[TrainingSample]
    rows: list[list[int]] = []  # packing: sample indices per row, best-fit decreasing by token budget
    step: int | None = None  # the optimiser step that trains it, from 0; deterministic runs only
    trace: dict[str, str] = {}  # of the batch itself, which is linked to its samples
    metrics: dict[str, float] = {}  # reduced over the samples, keys of sluice.pipeline.telemetry.training_metrics


class Shard(msgspec.Struct, frozen=True):
    """One file of a version's weights."""

    size: int  # bytes
    digest: str  # xxh3-128, hexadecimal


class WeightVersion(Wire, frozen=True, kw_only=True, tag="weight_version"):
    """One published version; stored beside the weights and in the registry. [T]"""

    version: int
    path: str  # directory, as seen by the workers
    digest: str  # xxh3-128 over `shards`; of a version without them sha256 over the files, as older releases wrote
    shards: dict[str, Shard] = {}  # by file name: the safetensors files, and an adapter's configuration
    dtype: str = ""  # that the trainer rounded float32 weights to: "bfloat16"; empty: it left them as they are
    base: str = ""  # digest of the model that these files are an adapter of; empty: they are a whole model
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}  # name -> (dtype, shape)
    probe_token_ids: TokenArray = msgspec.field(default_factory=TokenArray)
    probe_score: float | None = None  # summed logprob (nats) of the probe tokens after the first
    previous: int | None = None  # the version before, if the trainer knows it
    previous_score: float | None = None  # probe_score of `previous`
    parent: int | None = None  # live version before this one; -1: it is the first; None: version - 1
    branch: int = 0  # first version of its branch: 0, or the first one after a return to an older version
    step: int = 0  # the optimiser step whose weights it has
    trace: dict[str, str] = {}  # of that step
    published_at: float = 0.0  # Unix s by the broker's clock

    def __post_init__(self) -> None:
        check_time(self.published_at, "published_at")
        if not 0 <= self.version <= MOST_VERSION:
            raise MessageError(f"version must be in 0..{MOST_VERSION}, got {self.version}")


class DeadLetter(Wire, frozen=True, kw_only=True, tag="dead_letter"):
    """One sequence that ended without being trained. [Q] or [C]"""

    seq_id: str
    reason: str
    state: Literal["dead", "dropped"] = "dead"
    detail: str = ""
    traceback: str = ""
    attempts: int = 0
    worker: str = ""  # the last one that held it
    at: float = 0.0  # Unix time

    def __post_init__(self) -> None:
        check_time(self.at, "at")


MAX_ID = 256  # characters


class Turn(Wire, frozen=True, kw_only=True, tag="turn"):
    """One generation of a rollout; its number is its place among the rollout's turns."""

    key: str  # idempotency key of the call that requested it
    parent: int  # number of the turn that it follows; -1 = none
    history: str  # hash of the conversation up to and including it
    added_token_ids: TokenArray  # after the parent's last sampled token, images expanded; for a root the whole prompt
    sent_token_ids: TokenArray = msgspec.field(default_factory=TokenArray)  # these, not expanded; empty = the same
    result: SequenceResult  # its prompt_token_ids are empty
    message: Message  # as returned to the caller


class RolloutHead(Wire, frozen=True, kw_only=True, tag="rollout"):
    """Identity of a rollout. Raises MessageError for an id that is blank or too long, or a place outside its group."""

    rollout_id: str
    group_id: str
    group_size: int = 1
    index: int = 0
    task: str
    truth: Any = None
    metadata: dict[str, Any] = {}
    keep_messages: bool = False  # as of a DecodeJob: those of the request
    request: dict[str, Any] = {}  # the producer's request, so that it can be sent again
    opened_at: float = 0.0  # Unix s, stamped on opening
    trace: dict[str, str] = {}  # W3C trace context: the parent of its turns
    pinned_version: int | None = None  # of an evaluation: decoded under this one, and its end goes to the evaluator
    priority: int = 0  # of its turns

    def __post_init__(self) -> None:
        if not self.rollout_id.strip() or len(self.rollout_id) > MAX_ID:
            raise MessageError(f"rollout_id must have 1..{MAX_ID} characters, not all blank: {self.rollout_id!r:.80}")
        if not 0 <= self.index < self.group_size:
            raise MessageError(f"rollout {self.rollout_id}: index {self.index} is outside 0..{self.group_size - 1}")
        check_time(self.opened_at, "opened_at")

    @classmethod
    def alone(cls, rollout_id: str, task: str) -> RolloutHead:
        """The head of a rollout that no producer announced: a group of one."""
        return cls(rollout_id=rollout_id, group_id=rollout_id, task=task)
