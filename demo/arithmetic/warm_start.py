"""Warm start of the arithmetic task: the chain's format and most of its steps; the policy learns the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from sluice.demo.arithmetic import data, problems
from sluice.demo.tiny.model import ModelSettings, build_model
from sluice.demo.tiny.tokenizer import build_tokenizer
from sluice.demo.tiny.warm_start import OnProgress, Pair, Recipe, WarmStartSettings, encode_pair

SETTINGS = WarmStartSettings(num_steps=450, stop_loss=0.055, model=ModelSettings(intermediate_size=256))


def _pairs(count: int, seed: int, codec: PreTrainedTokenizerFast) -> Iterator[Pair]:
    """`count` train problems with their chains."""
    for problem in problems.problems("train", count, seed):
        yield encode_pair(codec, data.messages_of(problem), problem.worked)


_RECIPE = Recipe(
    name="arithmetic",
    sources=[data, problems, sys.modules[__name__]],
    tokenizer=build_tokenizer,
    network=build_model,
    pairs=_pairs,
)


def ensure_warm_start(
    cache_dir: Path, settings: WarmStartSettings | None = None, on_progress: OnProgress | None = None
) -> Path:
    """Directory of the warm-started model and its tokenizer; trained now unless it is cached."""
    return _RECIPE.ensure(cache_dir, settings or SETTINGS, on_progress)
