"""Requests, options and results of the offline engine (`GenerationEngine`); option defaults are the contract's."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from operator import index
from typing import Any, Literal

import msgspec

from sluice.pipeline.config.types import ModelConfig, VlmPreprocessOptions
from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import FinishReason, Message, SamplingParams
from sluice.workers.engine.contracts import EngineFacts

_OF_SAMPLING = frozenset(SamplingParams.__struct_fields__)


class ModelLoadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how it is loaded."""

    model_name_or_path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None  # None: bfloat16 on CUDA, else float32
    device: str = "auto"
    device_map: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    variant: Literal["auto", "text", "vlm"] = "auto"

    def config(self, preprocess: VlmPreprocessOptions | None = None) -> ModelConfig:
        """The same as the pipeline's configuration section."""
        return ModelConfig(
            path=self.model_name_or_path,
            dtype=self.dtype or "auto",
            device=self.device,
            device_map=self.device_map,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
            variant=self.variant,
            preprocess=preprocess or VlmPreprocessOptions(),
        )


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to decode a batch; greedy by default. Raises RequestError for a value out of range."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 = off
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    truncate_prompt: bool = False  # cut a prompt that is too long, from the left; the result says by how much
    eos_token_ids: tuple[int, ...] | None = None  # None: the model's; () = none
    pad_token_id: int | None = None  # None: the tokenizer's

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "top_k", self.sampling().top_k)  # one value for off
        try:
            msgspec.convert({"eos": self.eos_token_ids, "pad": self.pad_token_id}, _Overrides)
        except msgspec.ValidationError as error:
            raise RequestError(f"generation options, eos_token_ids or pad_token_id: {error}") from error

    def sampling(self) -> SamplingParams:
        """The same options as the queue's type."""
        shared = {name: getattr(self, name) for name in self.__struct_fields__ if name in _OF_SAMPLING}
        try:
            return msgspec.convert(shared, SamplingParams)  # a constructor doesn't check types
        except msgspec.ValidationError as error:
            raise RequestError(f"generation options: {error}") from error

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GenerationOptions:
        """Options from plain values. Raises RequestError for an unknown key or a bad value."""
        for key in values:
            if key not in cls.__struct_fields__:
                near = get_close_matches(key, cls.__struct_fields__, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(cls.__struct_fields__)}"
                raise RequestError(f"unknown generation option {key!r}; {hint}")
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise RequestError(f"generation options: {error}") from error


class _Overrides(msgspec.Struct):
    eos: tuple[int, ...] | None
    pad: int | None


class TextGenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: `messages` for the chat template, or token ids used unchanged."""

    messages: list[Message] = []
    prompt_token_ids: tuple[int, ...] = ()
    request_id: str = ""

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.prompt_token_ids):
            raise RequestError(f"request {self.request_id!r}: give either messages or prompt_token_ids")
        try:
            msgspec.structs.force_setattr(self, "prompt_token_ids", tuple(map(index, self.prompt_token_ids)))
        except TypeError as error:
            raise RequestError(f"request {self.request_id!r}: prompt_token_ids must be integers; {error}") from error


class VlmGenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with its images; each has an image part in the messages that says where it belongs, in their order.

    An image is a path, encoded bytes, a `PIL.Image.Image`, or an `ImageRef` within `images.roots` and `images.hosts`.
    """

    messages: list[Message]
    images: tuple[Any, ...]
    request_id: str = ""

    def __post_init__(self) -> None:
        if not self.messages:
            raise RequestError(f"request {self.request_id!r}: messages is empty; give at least one message")
        if not self.images:
            raise RequestError(f"request {self.request_id!r}: no image; a prompt of text is a TextGenerationRequest")


GenerationRequest = TextGenerationRequest | VlmGenerationRequest


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `finish_reason` error: nothing was decoded, and `error` says why."""

    request_id: str
    text: str = ""  # cleaned
    raw_text: str = ""  # complete, with special tokens
    prompt_token_ids: list[int] = []  # as the model saw them: image placeholders expanded, no padding
    prompt_truncated: int = 0  # tokens cut from the left by `truncate_prompt`
    token_ids: list[int] = []
    response_mask: list[int] = []  # 1 = sampled; empty = all ones; 0 for an end forced by the repeat guard
    logprobs: list[float] = []  # raw, nats
    versions: list[int] = []
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    triggers: dict[str, Any] = {}  # repeat_terminate and active, 0|1 each; rule, at_token; empty for an error
    error: str | None = None
    engine: EngineFacts
    fallback: dict[str, str] = {}  # filled only when an explicit fallback backend answered

    @property
    def num_prompt_tokens(self) -> int:
        """Without padding."""
        return len(self.prompt_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Generated tokens, including a forced end."""
        return len(self.token_ids)
