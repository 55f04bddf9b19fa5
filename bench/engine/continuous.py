"""transformers' continuous batching, with a length for each request.

- On CUDA its settings are its own defaults. On a CPU the defaults fill nine tenths of the memory with cache, so
  pages are as many as the sequences need, and at most 16 requests run together: its `sdpa` attention there is one
  product of all running requests with all their contexts, so 128 at once are slower than 16 after each other.
- Also tried on a CPU, once each on a busy machine, and about as fast or slower: 8 and 32 requests together, no limit,
  `paged|eager` attention, pages of 16 and 256 tokens, batches of 256 and 1024 tokens, no block sharing.
- One manager lives through all rounds; its start is part of the side's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.bench.engine.load import LONGEST, Ask
from sluice.bench.engine.model import CONTEXT
from sluice.bench.engine.padded import load_module
from sluice.pipeline.errors import EngineError

_POLL_S = 1.0
_TOGETHER = 16  # requests
_PAGE = 32  # tokens
_BATCH_TOKENS = 2048


class Continuous:
    """One of the sides."""

    def __init__(self, model: Path, most: int) -> None:
        """`most`: sequences that are asked for at a time."""
        from transformers import GenerationConfig

        module = load_module(model)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=LONGEST,
            eos_token_id=module.config.eos_token_id,
            pad_token_id=module.config.pad_token_id,
        )
        self._manager: Any = module.init_continuous_batching(
            generation_config=config, continuous_batching_config=_settings(module, most)
        )
        self._manager.warmup()
        self._manager.start()

    def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The new tokens of each sequence. Raises EngineError."""
        names = [self._manager.add_request(list(ask.prompt), max_new_tokens=ask.num_new_tokens) for ask in asks]
        found: dict[str, list[int]] = {}
        while len(found) < len(asks):
            result = self._manager.get_result(timeout=_POLL_S)
            if result is None and not self._manager.is_running():
                raise EngineError("transformers' continuous batching ended before its requests did; see its log")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise EngineError(f"transformers' continuous batching failed a request: {result.error}")
            found[result.request_id] = list(result.generated_tokens)
        return [found[name] for name in names]

    def close(self) -> None:
        """End its thread."""
        self._manager.stop(block=True, timeout=5.0, hard_stop=True)


def _settings(module: Any, most: int) -> Any:
    from transformers import ContinuousBatchingConfig

    if module.device.type != "cpu":
        return ContinuousBatchingConfig()
    together = min(most, _TOGETHER)
    return ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=together * CONTEXT // _PAGE,
        max_batch_tokens=_BATCH_TOKENS,
        max_requests_per_batch=together,
    )
