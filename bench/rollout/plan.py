"""What one run does."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import msgspec

from sluice.bench.pipeline.plan import HOME
from sluice.pipeline.errors import ConfigError

__all__ = ["HOME", "Plan", "Sizes"]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, and lengths in tokens."""

    prompt_words: int = 60  # of each prompt; the chat template adds a few tokens
    pairs: int = 200  # of `added`: a call on either side
    streamed_pairs: int = 40
    call_tokens: int = 32
    rollouts: int = 200  # at once, and in a round
    rollout_rounds: int = 3
    rollout_batch: int = 64  # worker.max_batch; also of `added`
    tool_latency_ms: tuple[int, int] = (10, 100)
    requests: int = 128  # of a round of `served`
    concurrency: int = 32  # requests at a time, and worker.max_batch
    request_tokens: int = 128
    served_rounds: int = 3


_QUICK = Sizes(
    prompt_words=8, pairs=5, streamed_pairs=2, call_tokens=8, rollouts=6, rollout_rounds=1, rollout_batch=8,
    tool_latency_ms=(1, 2), requests=8, concurrency=4, request_tokens=8, served_rounds=1,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    sizes: Sizes
    why_no_vllm: str | None  # None: the gateway is measured beside vLLM's own server

    @classmethod
    def of(cls, *, rounds: int | None, vllm: bool, quick: bool) -> Plan:
        """`rounds` of either part that has rounds. Checked. Raises ConfigError."""
        if rounds is not None and rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {rounds}")
        sizes = _QUICK if quick else Sizes()
        if rounds is not None:
            sizes = msgspec.structs.replace(sizes, rollout_rounds=rounds, served_rounds=rounds)
        why = None if vllm else "not asked for"
        if vllm and find_spec("vllm") is None:
            why = "vllm is not installed"
        return cls(sizes, why)
