"""How the offline way in (`GenerationEngine`) loads a model and decodes a batch; the defaults are the contract's."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from pipeline.config.types import ModelConfig, VllmEngineOptions, VlmPreprocessOptions
from pipeline.errors import RequestError
from pipeline.wire.messages import SamplingParams

__all__ = ["GenerationOptions", "ModelLoadConfig", "VllmEngineOptions", "VlmPreprocessOptions"]


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
    """How to decode a batch; greedy unless asked otherwise. Raises RequestError for a value out of range."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 = off
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    truncate_prompt: bool = False  # cut a prompt that is too long from the left; the result says by how much
    eos_token_ids: tuple[int, ...] | None = None  # None: those of the model; () = none
    pad_token_id: int | None = None  # None: that of the tokenizer

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
            return msgspec.convert(shared, SamplingParams)  # a constructor checks no types
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


_OF_SAMPLING = frozenset(SamplingParams.__struct_fields__)
