"""The sections that say which model is loaded and how the engines run it."""

from __future__ import annotations

from typing import Any, Literal

from pipeline.config.section import Section


class VlmPreprocessOptions(Section, frozen=True, kw_only=True):
    """How images become model inputs; None leaves it to the model's own processor."""

    max_pixels: int | None = None  # an image with more is made smaller
    min_pixels: int | None = None  # an image with fewer is made larger
    do_resize: bool | None = None


class ModelConfig(Section, frozen=True, kw_only=True):
    """Where the policy comes from and how it is loaded."""

    path: str = ""  # made by save_pretrained, with tokenizer and chat template; --model of `run`
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on CUDA, else float32
    device: str = "auto"  # auto: CUDA where there is one, else cpu
    device_map: str | None = None  # of transformers, for a model on several devices; `device` then says nothing
    attn_implementation: str | None = None  # of transformers; null: its own choice
    trust_remote_code: bool = False  # runs code of the model's directory
    variant: Literal["auto", "text", "vlm"] = "auto"  # auto: as the model is; text: takes no images
    preprocess: VlmPreprocessOptions = VlmPreprocessOptions()


class VllmEngineOptions(Section, frozen=True, kw_only=True):
    """The vLLM backend's engine; what is not here goes into `extra`, by vLLM's own names."""

    gpu_memory_utilization: float = 0.9  # share of the GPU's memory
    kv_cache_gb: float | None = None  # on CPU; None: 1, or VLLM_CPU_KVCACHE_SPACE
    max_model_len: int | None = None  # tokens; None: the model's context
    enforce_eager: bool = False  # no CUDA graphs, no compilation: slower, starts at once
    tensor_parallel_size: int = 1  # GPUs of one engine
    extra: dict[str, Any] = {}
