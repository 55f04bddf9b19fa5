"""What was decoded, again: sequences, and the masks of their constraints.

`sluice.engines: replay` decodes a sequence again, its weights switching where they did.

The engine gets the prompt, the seed and the sampling parameters, never the tokens: each part is decoded under its
version up to the position of the next one, and continued under that, as a worker continues a job that was redelivered.

`sluice.engines: constraints` derives the masks under which tokens were sampled, from the recorded sampling alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sluice.pipeline.config.types import Config, ModelConfig
from sluice.pipeline.errors import ModelError
from sluice.pipeline.images.store import ImageStore, images_of_run
from sluice.pipeline.wire.messages import SamplingParams, SequenceResult
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.workers.engine.backends import make_backend
from sluice.workers.engine.constraints import Constraint, Grammars, Narrowed, library
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest
from sluice.workers.model_files import end_token_ids, load_tokenizer, model_config

Part = tuple[int, Path, int]
"""A version, its directory, and how many tokens were sampled under it."""
Decode = Callable[[SequenceResult, int, Sequence[Part]], Awaitable[dict[str, Any]]]


@asynccontextmanager
async def open_replay(config: Config) -> AsyncGenerator[Decode]:
    """Decodes results again, by the run's backend, in this process. Raises ModelError, EngineError.

    A call returns token_ids, finish_reason, engine, load_s and decode_s; it raises RequestError, WeightsError.
    """
    began, limits = time.monotonic(), images_of_run(config)
    backend = make_backend(config.model, config.worker, config.rollout_matching.repeat_terminate, limits)
    try:
        await backend.start()
        start_s = time.monotonic() - began
        async with ImageStore(limits) as store:

            async def decode(result: SequenceResult, seed: int, parts: Sequence[Part]) -> dict[str, Any]:
                engine = await backend.for_images() if result.images else backend
                pixels = [await store.get(ref) for ref in result.images]
                so_far, output = SampledTokens(), None
                load_s, decode_s = start_s, 0.0
                for number, (version, directory, count) in enumerate(parts, 1):
                    began = time.monotonic()
                    await engine.load_weights(directory, version)
                    loaded = time.monotonic()
                    most = result.sampling.max_new_tokens
                    until = most if number == len(parts) else min(most, len(so_far) + count)
                    request = SequenceRequest(
                        seq_key=result.seq_id,
                        prompt_token_ids=tuple(result.prompt_token_ids),
                        sampling=replace(result.sampling, max_new_tokens=until),
                        seed=seed,
                        images=tuple(pixels),
                        so_far=so_far if len(so_far) else None,
                    )
                    output = await engine.decode(request)
                    load_s, decode_s = load_s + loaded - began, decode_s + time.monotonic() - loaded
                    so_far = output.sampled
                    if not _was_cut(output, until, most):
                        break
                assert output is not None, "a sequence has a part"
                facts = engine.facts
                return {
                    "token_ids": list(output.token_ids),
                    "finish_reason": output.finish_reason,
                    "engine": f"{facts.name} {facts.engine_version}",
                    "load_s": load_s,
                    "decode_s": decode_s,
                }

            yield decode
    finally:
        await backend.close()


@dataclass(frozen=True)
class Constraints:
    """Of one model's tokenizer."""

    library: str  # that derives the masks of grammars here, with its version; empty: none is installed
    first_excluded: Callable[[SamplingParams, Sequence[int]], int | None]
    """Index of the first of a sequence's sampled tokens that its constraint excludes; None: of none.

    Raises RequestError for a grammar that can't be compiled here.
    """


def open_constraints(model: ModelConfig) -> Constraints:
    """Raises ModelError for a directory without a tokenizer or configuration."""
    found = model_config(model.path)
    if not found:
        raise ModelError(f"{model.path}: no config.json, so its end-of-sequence ids are unknown")
    tokenizer: Any = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    text = found.get("text_config") or found
    generation = Path(model.path) / "generation_config.json"
    of_generation = json.loads(generation.read_bytes()).get("eos_token_id") if generation.is_file() else None
    ends = end_token_ids(
        of_generation, text.get("eos_token_id"), found.get("eos_token_id"), getattr(tokenizer, "eos_token_id", None)
    )
    grammars = Grammars(lambda: tokenizer, int(text["vocab_size"]))

    def first_excluded(sampling: SamplingParams, token_ids: Sequence[int]) -> int | None:
        constraint = Constraint.of(sampling, tokenizer, ends)
        if constraint is None:
            return None
        narrowed = Narrowed(constraint, grammars)
        for at, token in enumerate(token_ids):
            if not narrowed.admits(token):
                return at
        return None

    return Constraints(library(), first_excluded)


def _was_cut(output: SequenceOutput, until: int, most: int) -> bool:
    """Whether only the end of its part ended it."""
    return output.finish_reason == "length" and len(output.token_ids) == until < most
