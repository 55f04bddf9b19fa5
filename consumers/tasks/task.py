"""A task is three pure steps; each can be replaced from the config by import path.

    SequenceResult ──parse──▶ Parsed ──match──▶ Matched ──target──▶ TrainingSample

- Steps never do I/O and never raise on model output: a bad rollout is data. A bad *truth* raises TaskError.
- `metrics` are counters under the frozen keys of pipeline/telemetry/training_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sluice.pipeline.config.types import PolicyConfig, RolloutMatchingConfig
from sluice.pipeline.wire.messages import SequenceResult, TrainingSample


class TextCodec(Protocol):
    """Text ↔ token ids of the policy's tokenizer."""

    eos_token_ids: tuple[int, ...]  # turn terminators; the first one closes a target
    coord_token_ids: tuple[int, ...]  # 1000 ids of <|coord_0|>…<|coord_999|>, or empty

    def encode(self, text: str) -> list[int]:
        """Ids of the text, no special tokens added; special tokens spelled in the text are recognised."""
        ...

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that other text precedes: no space is put before it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Exact text of the ids, special tokens spelled out."""
        ...

    def char_ends(self, token_ids: Sequence[int]) -> list[int]:
        """Per token, the length of the decoded text up to and including it; non-decreasing, shape (len(token_ids),)."""
        ...


@dataclass(frozen=True)
class TaskContext:
    """Shared inputs of every step."""

    codec: TextCodec
    options: RolloutMatchingConfig
    seed: int = 0
    policy: PolicyConfig = field(default_factory=PolicyConfig)


@dataclass(frozen=True)
class Parsed:
    """What the model wrote. `value` is the task's own type; `prefix_len` tokens of the rollout are kept."""

    result: SequenceResult
    value: Any
    prefix_len: int
    valid: bool
    metrics: dict[str, float]


@dataclass(frozen=True)
class Matched:
    """Predictions compared to the truth; `value` is the task's own type."""

    parsed: Parsed
    value: Any
    metrics: dict[str, float]


Parse = Callable[[SequenceResult, TaskContext], Parsed]
Match = Callable[[Parsed, Any, TaskContext], Matched]
Target = Callable[[Matched, TaskContext], TrainingSample]


@dataclass(frozen=True)
class Task:
    """The three steps of one task."""

    name: str
    parse: Parse
    match: Match
    target: Target
