"""The versions that are published: those of a random Qwen3, trained on this repository's pages.

- fp32 masters, AdamW, next-token cross-entropy; versions are what a trainer publishes for bfloat16 workers.
- The learning rate decides how many values change, so it is that of reinforcement learning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

import sluice
from sluice.bench.harness import say

LEARNING_RATE = 1e-6
_ROWS, _TOKENS = 2, 128
_SKIPPED = "lm_head.weight"  # tied to the embedding


class Saved(NamedTuple):
    """A model directory in bfloat16."""

    directory: Path
    write_s: float  # cast and file; durable once it is published
    loss: float


def model_of(*, layers: int, hidden: int, vocab: int) -> Qwen3ForCausalLM:
    """Random, tied; 28 layers of 1024 with 151,936 tokens are 0.6 B parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), head_dim=64,
        tie_word_embeddings=True, max_position_embeddings=_TOKENS,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def trained(model: Qwen3ForCausalLM, home: Path, *, warm: int, count: int) -> Iterator[Saved]:
    """The model after `warm` steps, and after each of the next `count`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    tokens = torch.tensor(list(_text()), dtype=torch.long)
    for step in range(warm + count + 1):
        loss = float("nan")
        if step:
            at = step * _ROWS * _TOKENS % (len(tokens) - _ROWS * _TOKENS)
            rows = tokens[at : at + _ROWS * _TOKENS].view(_ROWS, _TOKENS)
            found = model(input_ids=rows, labels=rows).loss
            found.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss = float(found.detach())
        if step < warm:
            continue
        began = time.perf_counter()
        directory = home / f"step-{step:03d}"
        directory.mkdir(parents=True)
        state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if name != _SKIPPED}
        save_file(state, str(directory / "model.safetensors"), metadata={"format": "pt"})
        write_s = time.perf_counter() - began
        model.config.save_pretrained(directory)
        say(f"step {step}: loss {loss:.4f}")
        yield Saved(directory, write_s, loss)


def _text() -> bytes:
    return "".join(path.read_text() for path in sorted((Path(sluice.__file__).parent / "docs").glob("*.md"))).encode()
