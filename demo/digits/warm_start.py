"""Warm start: teach the random model the answer's form and a little reading, once, and keep the result.

- Plain teacher forcing on train-split scenes; the loss covers the answer tokens only.
- Cached under a key of every setting, every source file here and the library versions that matter.
- An interrupted run leaves nothing behind: the directory is written aside and renamed.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from demo.digits import cache, data, model, patches, scenes, tokenizer

IGNORED = -100
_CLIP_NORM = 1.0
_BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class WarmStartSettings:
    """How long and how fast; `num_steps` optimiser steps of `batch_size` fresh scenes each."""

    num_steps: int = 144
    batch_size: int = 32
    learning_rate: float = 3e-3
    num_warmup_steps: int = 20
    data_seed: int = 5
    model: model.ModelSettings = field(default_factory=model.ModelSettings)


@dataclass(frozen=True)
class WarmStartProgress:
    """What the callback hears after each step: counts, mean cross-entropy in nats, seconds so far."""

    step: int
    num_steps: int
    loss: float
    elapsed_s: float


OnProgress = Callable[[WarmStartProgress], None]


def encode_scene(scene: scenes.Scene, codec: Any) -> tuple[list[int], list[int]]:
    """Prompt ids and answer ids (turn terminator included) of a scene."""
    prompt = codec.apply_chat_template(data.messages_of(scene), add_generation_prompt=True, return_dict=False)
    answer = codec.encode(data.answer_text(scene.objects) + tokenizer.TURN_END, add_special_tokens=False)
    return prompt, answer


def collate(pairs: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded inputs and next-token labels, int64 [batch, length - 1]; -100 is no label."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    inputs = torch.full((len(pairs), length), pad_id)
    labels = torch.full((len(pairs), length), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        inputs[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = inputs[row, len(prompt) : end]
    return inputs[:, :-1], labels[:, 1:]


def answer_loss(network: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over labelled positions; logits are computed at those positions only."""
    kept = labels != IGNORED
    hidden = network.model(input_ids=inputs).last_hidden_state[kept]
    return functional.cross_entropy(network.lm_head(hidden), labels[kept])


def _batches(settings: WarmStartSettings, codec: Any) -> Iterator[tuple[torch.Tensor, ...]]:
    """`num_steps` batches of fresh train scenes."""
    total = settings.num_steps * settings.batch_size
    pairs = (encode_scene(scene, codec) for scene in scenes.scenes("train", total, settings.data_seed))
    while chunk := list(itertools.islice(pairs, settings.batch_size)):
        yield collate(chunk, int(codec.pad_token_id))


def train(
    network: Qwen3ForCausalLM,
    codec: Any,
    settings: WarmStartSettings,
    on_progress: OnProgress | None = None,
) -> None:
    """Train in place with AdamW: linear warm-up, then a constant rate, as later training has."""
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.learning_rate, betas=_BETAS, weight_decay=0.0, fused=True
    )
    started = time.monotonic()
    for step, (inputs, labels) in enumerate(_batches(settings, codec), start=1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / settings.num_warmup_steps)
        loss = answer_loss(network, inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), _CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if on_progress:
            on_progress(WarmStartProgress(step, settings.num_steps, loss.item(), time.monotonic() - started))


def warm_start_key(settings: WarmStartSettings) -> str:
    """Cache key: settings, the sources of this package, and the libraries that decide the numbers."""
    sources = [cache, data, model, patches, scenes, tokenizer, sys.modules[__name__]]
    libraries = ("torch", "transformers", "tokenizers", "scikit-learn", "numpy")
    return cache.content_key(asdict(settings), sources, {name: version(name) for name in libraries})


def ensure_warm_start(
    cache_dir: Path, settings: WarmStartSettings | None = None, on_progress: OnProgress | None = None
) -> Path:
    """Directory of the warm-started model and its tokenizer; trained now unless an equal one is cached."""
    settings = settings or WarmStartSettings()
    target = Path(cache_dir) / f"digits-warm-{warm_start_key(settings)}"
    if target.is_dir():
        return target
    codec = tokenizer.build_tokenizer()
    network = model.build_model(settings.model, codec)
    with cache.written_aside(target) as aside:
        train(network, codec, settings, on_progress)
        model.save_model(network, codec, aside)
        (aside / "warm_start.json").write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")
    return target
