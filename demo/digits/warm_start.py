"""Warm start of the digits task: the answer format and a little reading."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from sluice.demo.digits import data, model, patches, scenes, tokenizer
from sluice.demo.tiny import warm_start as tiny
from sluice.demo.tiny.warm_start import OnProgress, Pair, Recipe, WarmStartProgress, encode_pair

__all__ = ["WarmStartProgress", "WarmStartSettings", "ensure_warm_start", "warm_start_key"]


@dataclass(frozen=True)
class WarmStartSettings(tiny.WarmStartSettings):
    """The common settings, with this model's shape."""

    model: model.ModelSettings = field(default_factory=model.ModelSettings)


def _pairs(count: int, seed: int, codec: PreTrainedTokenizerFast) -> Iterator[Pair]:
    """`count` train scenes."""
    for scene in scenes.scenes("train", count, seed):
        yield encode_pair(codec, data.messages_of(scene), data.answer_text(scene.objects))


_RECIPE = Recipe(
    name="digits",
    sources=[data, model, patches, scenes, tokenizer, sys.modules[__name__]],
    tokenizer=tokenizer.build_tokenizer,
    network=model.build_model,
    pairs=_pairs,
)


def warm_start_key(settings: WarmStartSettings) -> str:
    return _RECIPE.key(settings)


def ensure_warm_start(
    cache_dir: Path, settings: WarmStartSettings | None = None, on_progress: OnProgress | None = None
) -> Path:
    """Directory of the warm-started model and its tokenizer; trained now unless it is cached."""
    return _RECIPE.ensure(cache_dir, settings or WarmStartSettings(), on_progress)
