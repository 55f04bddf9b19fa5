"""`sluice generate`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter


def generate(
    *,
    model: Annotated[str, Parameter(help="Model directory: config, tokenizer and safetensors.")],
    source: Annotated[
        str,
        Parameter(
            name=["--in", "-i"], allow_leading_hyphen=True, help="JSONL, Parquet or a data set; - is standard input."
        ),
    ],
    out: Annotated[
        str,
        Parameter(
            name=["--out", "-o"],
            allow_leading_hyphen=True,
            help="JSONL or Parquet by its suffix; - is standard output.",
        ),
    ],
    # Not `BackendName`: `sluice --help` would import the configuration.
    backend: Annotated[Literal["hf", "vllm"], Parameter(help="hf: correctness first; vllm: fast.")] = "hf",
    fallback_backend: Annotated[Literal["hf"] | None, Parameter(help="For images that vllm does not support.")] = None,
    max_new_tokens: Annotated[int, Parameter(help="Tokens per answer.")] = 256,
    temperature: Annotated[float, Parameter(help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, Parameter(help="Sample from the likeliest tokens with this total probability; 1 is off.")
    ] = 1.0,
    top_k: Annotated[int, Parameter(help="0 and -1 are off.")] = 0,
    repetition_penalty: Annotated[
        float, Parameter(help="Above 1: tokens of the prompt and the answer become less likely; 1 is off.")
    ] = 1.0,
    seed: Annotated[int, Parameter(help="The seed of a sequence is derived from it, the row and the index.")] = 0,
    stop: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", show_default=False, allow_leading_hyphen=True, help="End at this text; may be repeated."
        ),
    ] = (),
    stop_token_ids: Annotated[
        tuple[int, ...], Parameter(negative="", show_default=False, help="End at this token id; may be repeated.")
    ] = (),
    eos_token_ids: Annotated[
        tuple[int, ...] | None, Parameter(negative="", help="Replace the model's end-of-sequence ids.")
    ] = None,
    ignore_eos: Annotated[bool, Parameter(negative="", help="Do not stop at end-of-sequence tokens.")] = False,
    pad_token_id: Annotated[int | None, Parameter(help="Replaces the tokenizer's.")] = None,
    truncate_prompt: Annotated[bool, Parameter(negative="", help="Cut a prompt that is too long.")] = False,
    n: Annotated[int, Parameter(name=["--n", "-n"], help="Sequences per prompt.")] = 1,
    enable_thinking: Annotated[bool, Parameter(negative="", help="Passed to the chat template.")] = False,
    plugin: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="balanced_json, duplicate_objects or module:Class; may be repeated.",
        ),
    ] = (),
    max_batch: Annotated[int, Parameter(help="Sequences decoded at once.")] = 32,
    torch_threads: Annotated[int, Parameter(help="0 is torch's own choice.")] = 0,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        Parameter(help="auto: bfloat16 on CUDA, else float32. [default: auto]"),
    ] = None,
    device: Annotated[str | None, Parameter(help="auto, cpu, cuda or cuda:1. [default: auto]")] = None,
    overrides: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set", negative="", show_default=False, help="Any other key, e.g. worker.vllm.max_model_len=4096"
        ),
    ] = (),
    fields: Annotated[Literal["minimal", "all"], Parameter(help="all: tokens, logprobs and more")] = "all",
    on_malformed: Annotated[
        Literal["stop", "skip"], Parameter(help="A row that cannot be read: stop, or make it an error row.")
    ] = "stop",
    restart: Annotated[bool, Parameter(negative="", help="Start over; replaces OUT and its part file.")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="One JSON summary on stdout.")] = False,
) -> int:
    """Answer a file of prompts with one engine, without a broker. Run it again to resume.

    A row has `messages`, `prompt` or `prompt_token_ids`, and may have `id`, `images` and `metadata`. `--set` takes the
    keys `model.*`, `worker.vllm.*`, `rollout_matching.repeat_terminate.*` and `images.*` (without its store) of the
    configuration. Exit code 9: some rows ended in an error; each such row says why.

    Example: `sluice generate --model ./my-model --in prompts.jsonl --out answers.jsonl --max-new-tokens 64`
    """
    from sluice.workers.offline.run import run
    from sluice.workers.offline.settings import make_settings

    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "truncate_prompt": truncate_prompt,
        "eos_token_ids": () if ignore_eos else eos_token_ids,
        "pad_token_id": pad_token_id,
    }
    files: Any = {"source": source, "out": out, "fields": fields, "on_malformed": on_malformed, "restart": restart}
    settings = make_settings(
        options=options,
        model={"path": model, "dtype": dtype, "device": device},
        overrides=overrides,
        backend=backend,
        fallback_backend=fallback_backend,
        n=n,
        enable_thinking=enable_thinking,
        plugins=plugin,
        max_batch=max_batch,
        torch_threads=torch_threads,
        as_json=as_json,
        **files,
    )
    return run(settings)
