"""A random Qwen3 that learns this repository's pages, and the snapshots that a trainer takes of it.

- fp32 masters, AdamW, next-token cross-entropy; the learning rate decides how many values change, so it is that of
  reinforcement learning.
- The tokenizer knows bytes: the other rows of the vocabulary have the real model's size, and are random.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import sluice
from sluice.bench.models import byte_tokenizer
from sluice.consumers.training.model import probe_tokens
from sluice.consumers.training.snapshot import Memory, Shadow, Snapshot

LEARNING_RATE = 1e-6
CONTEXT = 1024
_ROWS, _TOKENS = 2, 64
_PROBE_TOKENS = 16
_SPECIALS = ("<|pad|>", "<|end|>")


class Training:
    """The model, its optimiser, and `source`: the model directory that it started from, in bfloat16."""

    def __init__(self, source: Path, *, layers: int, hidden: int, vocab: int) -> None:
        """28 layers of 1024 with 151,936 tokens are 0.5 B parameters."""
        torch.manual_seed(0)
        tokenizer = byte_tokenizer(_SPECIALS, CONTEXT)
        config = Qwen3Config(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), head_dim=64,
            tie_word_embeddings=True, max_position_embeddings=CONTEXT, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )  # fmt: skip
        self.model: Any = Qwen3ForCausalLM(config)
        self.source, self.probe = source, probe_tokens(vocab, _PROBE_TOKENS, seed=0)
        self.stalled_s = 0.0  # of the newest step
        self._shadow, self._memory = Shadow(self.model), Memory()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self._tokens = torch.tensor(list(_text()), dtype=torch.long)
        self._steps = 0
        source.mkdir(parents=True)
        config.dtype, config.architectures = torch.bfloat16, [type(self.model).__name__]
        config.save_pretrained(source)
        tokenizer.save_pretrained(source)
        self.snapshot().write(source, source)

    def step(self, before_update: Callable[[], None] = lambda: None) -> float:
        """One Adam step; its seconds. `before_update` is called when the weights are about to change."""
        began = time.monotonic()
        at = self._steps * _ROWS * _TOKENS % (len(self._tokens) - _ROWS * _TOKENS)
        rows = self._tokens[at : at + _ROWS * _TOKENS].view(_ROWS, _TOKENS)
        self.model(input_ids=rows, labels=rows).loss.backward()
        waits = time.monotonic()
        before_update()
        self.stalled_s = time.monotonic() - waits
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        return time.monotonic() - began

    def snapshot(self) -> Snapshot:
        """Of the weights as they are now."""
        return Snapshot(
            self.model, torch.bfloat16, lambda tensors: self._shadow.score(tensors, self.probe), memory=self._memory
        )


def _text() -> bytes:
    return "".join(path.read_text() for path in sorted((Path(sluice.__file__).parent / "docs").glob("*.md"))).encode()
