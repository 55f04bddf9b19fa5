"""Runs whose batches are all there: they need nobody but a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from sluice.pipeline.broker import connection
from sluice.pipeline.weights.registry import WeightsRegistry
from sluice.pipeline.wire.messages import TrainingBatch, TrainingSample, WeightVersion, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.e2e.fixtures import MakeStack
from tests.e2e.stack import Stack
from tests.trainers import random_sample

SamplesOf = Callable[[int], list[TrainingSample]]
STEPS = 4
LENGTH = 16
TOLERANCE = 1e-4
"""The plain trainer makes logits in pieces, a sharded one at once; sums are rounded differently: 3.4e-5 was seen."""


def ready_run(
    make_stack: MakeStack, samples_of: SamplesOf | None = None, *, steps: int = STEPS, **sections: Any
) -> Stack:
    """With a policy loss."""
    stack = make_stack(
        [],
        "exact_answer",
        producer={"samples_per_version": 2},
        scorer={"count": 0},
        policy={"enabled": True, "advantage": "reward", "weight_cap": 1e6, "weight_floor": 1e-9},
        **{"trainer": {"keep_checkpoints": 10}, **sections},
    )
    hand_on(stack, samples_of or text_samples, steps)
    return stack


def text_samples(step: int) -> list[TrainingSample]:
    """Two, sampled by the version before the trainer's: it scores them itself before the update."""
    return [
        replace(
            random_sample(f"{step}-{member}", LENGTH),
            logprobs=FloatArray([-6.0] * LENGTH),
            versions=Runs.of([max(0, step - 1)] * LENGTH),
            response_mask=Runs.of([0, 0] + [1] * (LENGTH - 2)),
            advantage=1.0 - 2 * member,
        )
        for member in range(2)
    ]


def hand_on(stack: Stack, samples_of: SamplesOf, steps: int, first: int = 0) -> None:
    """Two samples per step, from the first to the end of the run."""
    client = stack.client()
    for step in range(first, steps):
        samples = samples_of(step)
        client.xadd(stack.keys.batches, {"b": encode(TrainingBatch(batch_id=str(step), samples=samples))})
        for name in ("enqueued", "accepted"):
            client.hincrby(stack.keys.counts, name, 2)
    client.hset(stack.keys.source, "exhausted", "1")
    client.close()


def manifest(stack: Stack) -> WeightVersion:
    """Of the newest version."""

    async def read() -> WeightVersion | None:
        client = connection.connect(stack.broker_config)
        try:
            registry = WeightsRegistry(client, stack.keys)
            return await registry.get(await registry.latest() or 0)
        finally:
            await client.aclose()

    found = asyncio.run(read())
    assert found is not None
    return found


def tensors(stack: Stack, step: int) -> dict[str, torch.Tensor]:
    directory = stack.run_dir / "checkpoints" / f"step-{step:06d}"
    moments = load_file(directory / "trainer/optimizer.safetensors")
    return load_file(directory / "model.safetensors") | {f"optimizer {name}": value for name, value in moments.items()}


def apart(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of equal names."""
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)
