"""Warm start: teach a random model the answer format and a little of the task, once, and keep the result.

- Plain teacher forcing on train-split problems; the loss covers the answer tokens only.
- Cached under a key of every setting, every relevant source file and the library versions.
- An interrupted run leaves nothing behind: the directory is written elsewhere and renamed.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from sluice.demo.tiny import cache, model, tokenizer

IGNORED = -100
_CLIP_NORM = 1.0
_BETAS = (0.9, 0.99)
_RECENT = 8
_LIBRARIES = ("torch", "transformers", "tokenizers", "scikit-learn", "numpy")

Pair = tuple[list[int], list[int]]
"""Prompt ids and answer ids, turn terminator included."""
Example = tuple[list[int], ...]
"""A pair, or a conversation: what is given and what is to be written, in turn."""
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The model's arguments, and next-token labels, int64 [batch, length]; IGNORED is no label."""


@dataclass(frozen=True)
class WarmStartSettings:
    """Duration and learning rate; at most `num_steps` optimiser steps of `batch_size` fresh problems each."""

    num_steps: int = 144
    batch_size: int = 32
    learning_rate: float = 3e-3
    num_warmup_steps: int = 20
    data_seed: int = 5
    stop_loss: float | None = None  # nats; stops once the mean of the last 8 steps is below it
    model: model.ModelSettings = field(default_factory=model.ModelSettings)


@dataclass(frozen=True)
class WarmStartProgress:
    """Passed to the callback after each step: counts, mean cross-entropy in nats, elapsed seconds."""

    step: int
    num_steps: int
    loss: float
    elapsed_s: float


OnProgress = Callable[[WarmStartProgress], None]


@dataclass(frozen=True)
class Recipe:
    """The task's part: `network` builds the fresh model, `pairs(count, seed, tokenizer)` yields train problems.

    `collator(tokenizer)` makes a batch of them; a task with pictures has its own.
    """

    name: str
    sources: Sequence[ModuleType]
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    network: Callable[[Any, PreTrainedTokenizerFast], Any]
    pairs: Callable[[int, int, PreTrainedTokenizerFast], Iterator[Any]]
    collator: Callable[[PreTrainedTokenizerFast], Callable[[Sequence[Any], int], Batch]] = lambda codec: collate
    save: Callable[[Any, PreTrainedTokenizerFast, Path], None] = model.save_model

    def key(self, settings: WarmStartSettings) -> str:
        """Cache key: settings, the sources of the task and of this package, and the library versions."""
        sources = [*self.sources, cache, model, tokenizer, sys.modules[__name__]]
        return cache.content_key(asdict(settings), sources, {name: version(name) for name in _LIBRARIES})

    def ensure(self, cache_dir: Path, settings: WarmStartSettings, on_progress: OnProgress | None = None) -> Path:
        """Directory of the warm-started model and its tokenizer; trained now unless it is cached."""
        target = Path(cache_dir) / f"{self.name}-warm-{self.key(settings)}"
        if target.is_dir():
            return target
        codec = self.tokenizer()
        network = self.network(settings.model, codec)
        with cache.written_aside(target) as aside:
            batches = self.batches(settings, codec)
            train(network, batches, settings, on_progress)
            self.save(network, codec, aside)
            (aside / "warm_start.json").write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")
        return target

    def batches(self, settings: WarmStartSettings, codec: PreTrainedTokenizerFast) -> Iterator[Batch]:
        """`num_steps` batches of fresh problems."""
        problems = self.pairs(settings.num_steps * settings.batch_size, settings.data_seed, codec)
        make, pad_id = self.collator(codec), int(codec.pad_token_id)  # pyright: ignore[reportArgumentType]
        for _ in range(settings.num_steps):
            yield make(list(itertools.islice(problems, settings.batch_size)), pad_id)


def train(
    network: Any, batches: Iterator[Batch], settings: WarmStartSettings, on_progress: OnProgress | None = None
) -> None:
    """Train in place with AdamW: linear warm-up, then a constant rate, as in later training.

    Stops after `num_steps`, or earlier at `stop_loss`.
    """
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.learning_rate, betas=_BETAS, weight_decay=0.0, fused=True
    )
    started = time.monotonic()
    recent: deque[float] = deque(maxlen=_RECENT)
    for step, batch in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / settings.num_warmup_steps)
        loss = answer_loss(network, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), _CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if on_progress:
            on_progress(WarmStartProgress(step, settings.num_steps, recent[-1], time.monotonic() - started))
        if settings.stop_loss is not None and len(recent) == _RECENT and fmean(recent) < settings.stop_loss:
            return


def collate(pairs: Sequence[Example], pad_id: int) -> Batch:
    """Right-padded inputs and next-token labels, int64 [batch, length - 1]."""
    length = max(sum(map(len, example)) for example in pairs)
    inputs = torch.full((len(pairs), length), pad_id)
    labels = torch.full((len(pairs), length), IGNORED)
    for row, example in enumerate(pairs):
        start = 0
        for number, piece in enumerate(example):
            end = start + len(piece)
            inputs[row, start:end] = torch.tensor(piece)
            if number % 2:
                labels[row, start:end] = inputs[row, start:end]
            start = end
    return {"input_ids": inputs[:, :-1]}, labels[:, 1:]


def answer_loss(network: Any, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over labelled positions; logits are computed at those positions only."""
    kept = labels != IGNORED
    hidden = network.model(**inputs).last_hidden_state[kept]
    return functional.cross_entropy(network.lm_head(hidden), labels[kept])


def encode_pair(codec: Any, messages: list[dict[str, Any]], answer: str) -> Pair:
    """Token ids of a chat and its answer."""
    prompt = codec.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return prompt, codec.encode(answer + tokenizer.TURN_END, add_special_tokens=False)
