"""Warm start of the pictures task: the answer format, boxes, and a little reading."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from sluice.demo.digits import data as answers
from sluice.demo.digits import pictures, scenes
from sluice.demo.digits import tokenizer as digits_tokenizer
from sluice.demo.pictures import data, model, processor
from sluice.demo.tiny import warm_start as tiny
from sluice.demo.tiny.warm_start import Batch, OnProgress, Pair, Recipe, encode_pair


@dataclass(frozen=True)
class WarmStartSettings(tiny.WarmStartSettings):
    """The common settings, with this model's shape."""

    num_steps: int = 112
    batch_size: int = 16
    learning_rate: float = 2e-3
    model: model.ModelSettings = field(default_factory=model.ModelSettings)


@dataclass(frozen=True)
class Example:
    """A picture, and the prompt with its placeholder, not yet expanded."""

    picture: Image.Image
    pair: Pair


def _examples(count: int, seed: int, codec: PreTrainedTokenizerFast) -> Iterator[Example]:
    """`count` train scenes."""
    for scene in data.pictured_scenes("train", count, seed):
        pair = encode_pair(codec, data.messages_of(scene), answers.answer_text(scene.objects))
        yield Example(data.picture_of(scene), pair)


class Collator:
    """Expands the placeholders as the model's processor does, and adds the pixels."""

    def __init__(self, codec: PreTrainedTokenizerFast) -> None:
        self._image_processor = processor.build_image_processor()
        self._image_id = int(codec.convert_tokens_to_ids(processor.IMAGE_TOKEN))  # pyright: ignore[reportArgumentType]

    def __call__(self, examples: Sequence[Example], pad_id: int) -> Batch:
        made: Any = self._image_processor(images=[one.picture for one in examples], return_tensors="pt")
        counts = made["image_grid_thw"].prod(-1) // processor.MERGE**2
        pairs = [(self._expanded(one.pair[0], int(n)), one.pair[1]) for one, n in zip(examples, counts, strict=True)]
        inputs, labels = tiny.collate(pairs, pad_id)
        types = (inputs["input_ids"] == self._image_id).to(torch.int64)
        return {**inputs, **made, "mm_token_type_ids": types}, labels

    def _expanded(self, prompt: list[int], count: int) -> list[int]:
        at = prompt.index(self._image_id)
        return [*prompt[:at], *[self._image_id] * count, *prompt[at + 1 :]]


_RECIPE = Recipe(
    name="pictures",
    sources=[answers, scenes, pictures, digits_tokenizer, data, model, processor, sys.modules[__name__]],
    tokenizer=processor.build_tokenizer,
    network=model.build_model,
    pairs=_examples,
    collator=Collator,
    save=processor.save_model,
)


def ensure_warm_start(
    cache_dir: Path, settings: WarmStartSettings | None = None, on_progress: OnProgress | None = None
) -> Path:
    """Directory of the warm-started model and its processor; trained now unless it is cached."""
    return _RECIPE.ensure(cache_dir, settings or WarmStartSettings(), on_progress)
