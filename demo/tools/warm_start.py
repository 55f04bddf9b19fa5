"""Warm start of the tools task: the format of calls and answers, and copying numbers; the policy learns the rest."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from sluice.demo.tiny.model import ModelSettings, build_model
from sluice.demo.tiny.warm_start import Example, OnProgress, Recipe, WarmStartSettings
from sluice.demo.tools import data, demonstrations, problems, tokenizer

_SHAPE = ModelSettings(intermediate_size=256, num_layers=2, num_heads=8, num_kv_heads=4)
"""Many heads and few layers: what it does is copying."""

SETTINGS = WarmStartSettings(num_steps=360, model=_SHAPE)

_WORKED_SHARE = 0.7  # of the demonstrations; the model learns copying from them, before the careless ones


def _examples(count: int, seed: int, codec: PreTrainedTokenizerFast) -> Iterator[Example]:
    """`count` train problems with a conversation each: right ones first, then careless ones."""
    rng = random.Random(seed)
    for index, problem in enumerate(problems.problems("train", count, seed)):
        right = index < _WORKED_SHARE * count
        turns = demonstrations.worked(problem) if right else demonstrations.careless(problem, rng)
        yield demonstrations.encode(codec, turns)


_RECIPE = Recipe(
    name="tools",
    sources=[data, demonstrations, problems, tokenizer, sys.modules[__name__]],
    tokenizer=tokenizer.build_tokenizer,
    network=build_model,
    pairs=_examples,
)


def ensure_warm_start(
    cache_dir: Path, settings: WarmStartSettings | None = None, on_progress: OnProgress | None = None
) -> Path:
    """Directory of the warm-started model and its tokenizer; trained now unless it is cached."""
    return _RECIPE.ensure(cache_dir, settings or SETTINGS, on_progress)
