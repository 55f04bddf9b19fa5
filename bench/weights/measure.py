"""The benchmark's plan, and its parts one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from sluice.bench.harness import BenchPlan, aim
from sluice.bench.weights import delta, training

_WARM = 10  # Adam steps before anything is measured


class Plan(BenchPlan, frozen=True, kw_only=True):
    """The model's size, and how many versions are measured."""

    QUICK: ClassVar[Mapping[str, Any]] = {"layers": 2, "hidden": 128, "vocab": 512, "steps": 3, "rounds": 2}
    BOUNDS: ClassVar[Mapping[str, tuple[int, float]]] = {"vocab": (256, math.inf), "hidden": (128, math.inf)}

    layers: int
    hidden: int
    vocab: int
    steps: int
    rounds: int
    threads: int


def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """`delta_share` (compressed ÷ whole bfloat16 bytes), `bytes` by carrier, `vs_copy.delta` by Mbit/s."""
    torch.set_num_threads(plan.threads)
    model = training.model_of(layers=plan.layers, hidden=plan.hidden, vocab=plan.vocab)
    versions = list(training.trained(model, home / "steps", warm=_WARM, count=plan.steps))
    shares = delta.shares(versions, home)
    engine = model.bfloat16()
    probe = torch.arange(16).view(1, -1)

    @torch.inference_mode()
    def score() -> float:
        return float(engine(input_ids=probe).logits.float().log_softmax(-1).max())

    with torch.no_grad():
        ratios, parts, sizes = delta.over_links(versions[: plan.rounds + 1], engine, home, score)
    return {
        "parameters": sum(value.numel() for value in model.parameters()),
        "learning_rate": training.LEARNING_RATE,
        "delta_share": median(shares),
        "delta_shares": shares,
        "bytes": sizes,
        "vs_copy": {"delta": ratios},
        "delta_s": parts,
        "aims": {"delta_share": aim("<=", 0.05, median(shares)), "vs_copy.delta": aim("<=", 0.3, ratios["500"])},
    }
