"""A real Qwen3 whose greedy continuation is written by hand: every token has one successor.

Embeddings are one-hot and the layers add nothing, so that the head reads the last token alone; attention and
feed-forward are computed all the same. Chains lead into loops of known periods, or to an end of sequence.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sluice.bench.models import follow, write_successors
from tests.tiny_models import build_tokenizer

PERIODS = (1, 2, 3, 5, 8)
Chain = tuple[Sequence[int], Sequence[int]]
"""Tokens that lead into a loop, and the loop."""

_MARGIN = 30.0  # between the best two logits


@dataclass(frozen=True)
class LoopModel:
    """`successor[t]` follows token t; `looping` and `healthy` are first tokens of chains."""

    directory: Path
    eos: int
    successor: dict[int, int]
    looping: tuple[int, ...]
    healthy: tuple[int, ...]

    def continuation(self, token: int, count: int) -> list[int]:
        """The next tokens after `token`, up to and with an end of sequence."""
        return follow(self.successor, self.eos, token, count)


def save_loop_model(
    directory: Path,
    *,
    context: int = 256,
    eos_token_id: int | None = None,
    sharpness: float = _MARGIN,
    chains: Sequence[Chain] = (),
    tokenizer: Any = None,
) -> LoopModel:
    """Write it; `eos_token_id` 0 makes the first token of the vocabulary the end of sequence.

    `chains` are written as they are, without a common token; the other tokens are laid out by themselves.
    `tokenizer`: None for the one of `tiny_models`.
    """
    tokenizer = tokenizer or build_tokenizer()
    vocab = len(tokenizer)
    eos = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    taken = {eos, *(token for lead, loop in chains for token in (*lead, *loop))}
    successor, looping, healthy = _chains([token for token in range(vocab) if token not in taken], eos)
    for lead, loop in chains:
        chain = [*lead, *loop, loop[0]]
        successor |= dict(itertools.pairwise(chain))
        looping += [*lead, loop[0]]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=-(-vocab // 32) * 32,  # one dimension for each token
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        eos_token_id=eos,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        write_successors(model, torch.eye(config.hidden_size)[:vocab], successor, sharpness)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return LoopModel(directory, eos, successor, tuple(looping), tuple(healthy))


def _chains(tokens: list[int], eos: int) -> tuple[dict[int, int], list[int], list[int]]:
    """Loops with a lead of 0 to 6 tokens in turn, until a third of the vocabulary is left for one healthy chain."""
    successor, looping, at = {eos: eos}, list[int](), 0
    while at < 2 * len(tokens) // 3:
        for lead, period in enumerate(PERIODS):
            chain = tokens[at : at + lead + period]
            successor |= dict(zip(chain, [*chain[1:], chain[lead]], strict=True))
            looping += chain[: lead + 1]
            at += lead + period
    rest = tokens[at:]
    successor |= dict(zip(rest, [*rest[1:], eos], strict=True))
    return successor, looping, rest


def without_end(directory: Path) -> Path:
    """Take every end-of-sequence id out of a saved model and its tokenizer."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        tree = json.loads((directory / name).read_text())
        tree.pop("eos_token", None)
        (directory / name).write_text(json.dumps({**tree, "eos_token_id": None}))
    return directory


def in_lower_case(directory: Path) -> Path:
    """Make a saved tokenizer write its text in lower case, so that no capital has a token."""
    path = directory / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "Lowercase"}}))
    return directory
