"""Tiny real trainers for the training tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from sluice.consumers.training.model import load_policy
from sluice.consumers.training.step import TrainStep
from sluice.pipeline.config.types import ModelConfig, PolicyConfig, TrainerConfig
from sluice.pipeline.wire.messages import TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import training_sample

VOCAB = 256


def random_sample(name: str, length: int, seed: int = 0) -> TrainingSample:
    """Random tokens, the first two of them prompt, weights 0.5 to 1.5."""
    drawn = random.Random(f"{name}/{seed}")
    ids = [drawn.randrange(VOCAB) for _ in range(length)]
    return training_sample(
        f"{name}:0",
        length,
        token_ids=TokenArray(ids),
        labels=TokenArray(ids),
        weights=FloatArray([0.0, 0.0] + [0.5 + drawn.random() for _ in range(length - 2)]),
        segments=Runs.of([0] * length),
        prompt_len=2,
    )


def train_step(
    source: Path,
    *,
    row_tokens: int = 64,
    coord_ids: tuple[int, ...] = (),
    attention: str | None = None,
    policy: PolicyConfig | None = None,
    **options: Any,
) -> TrainStep:
    """A step on the tiny model of a directory."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = load_policy(source, ModelConfig(path=str(source), device="cpu", attn_implementation=attention))
    return TrainStep(
        model,
        TrainerConfig(**options),
        pad_id=258,
        row_tokens=row_tokens,
        coord_ids=coord_ids,
        policy=policy or PolicyConfig(),
    )


def weights_of(step: TrainStep) -> dict[str, torch.Tensor]:
    """A copy."""
    return {name: value.detach().clone() for name, value in step.model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
