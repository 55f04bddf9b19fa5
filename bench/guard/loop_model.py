"""A Qwen3 that loops, written by hand: every token has one successor, whatever stands before it.

- Embeddings are random unit vectors and the layers add nothing, so that the head reads the last token alone;
  attention and feed-forward are computed all the same.
- Each loop has a chain of LEAD tokens that leads into it; one more chain ends by an end of sequence.
- A third of the loops repeat one token; the periods of the others are spread evenly over 2 to 64.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

CONTEXT = 4096
LEAD, HEALTHY = 256, 512  # tokens
PERIODS = (*[1] * 8, *(2 + round(number * 62 / 15) for number in range(16)))

_SPECIALS = ("<|pad|>", "<|end|>")
_SHARPNESS = 30.0  # the best logit; the others stay below half of it
_TEMPLATE = "{{- messages[-1].content -}}"


@dataclass(frozen=True)
class Shape:
    """Sizes in units (hidden, intermediate), counts otherwise."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = CONTEXT


@dataclass(frozen=True)
class Chains:
    """Token ids: `loops` as (lead, loop), the chain that ends, and who follows whom (the last id is the end)."""

    loops: tuple[tuple[range, range], ...]
    healthy: range
    successor: dict[int, int]

    @classmethod
    def make(cls) -> Chains:
        """Always the same; ids count the words of the vocabulary from 0."""
        at, loops, successor = 0, list[tuple[range, range]](), dict[int, int]()
        for period in PERIODS:
            lead, loop = range(at, at + LEAD), range(at + LEAD, at + LEAD + period)
            successor |= {token: token + 1 for token in (*lead, *loop)} | {loop[-1]: loop[0]}
            loops.append((lead, loop))
            at = loop.stop
        healthy = range(at, at + HEALTHY)
        end = healthy.stop + 1  # after the padding
        successor |= {token: token + 1 for token in healthy} | {healthy[-1]: end, end: end}
        return cls(tuple(loops), healthy, successor)

    @property
    def end(self) -> int:
        """The end of sequence."""
        return self.healthy.stop + 1

    def continuation(self, token: int, count: int) -> list[int]:
        """At most `count` tokens after `token`, up to and with the end of sequence."""
        return follow(self.successor, self.end, token, count)


def word(token: int) -> str:
    """How a chain's token is written."""
    return f"w{token:05}"


def ensure_model(home: Path) -> Path:
    """Directory of the model and its tokenizer; made now unless an equal one is there."""
    from sluice.demo.tiny import cache

    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    target = home / f"loop-model-{cache.content_key(asdict(Shape()), [sys.modules[__name__]], libraries)}"
    if not target.is_dir():
        with cache.written_aside(target) as aside:
            _save(Chains.make(), aside)
    return target


def follow(successor: Mapping[int, int], end: int, token: int, count: int) -> list[int]:
    """At most `count` tokens after `token`, up to and with the end of sequence."""
    tokens: list[int] = []
    while len(tokens) < count and token != end:
        token = successor[token]
        tokens.append(token)
    return tokens


def write_successors(model: Any, vectors: Any, successor: Mapping[int, int], sharpness: float) -> None:
    """Make the logits of each token's successor `sharpness`, in a Qwen3 of one layer, whatever stands before.

    `vectors` float (vocab, hidden): embeddings of length 1, near to orthogonal. Under `torch.no_grad`.
    """
    import torch

    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(vectors)
    head = torch.zeros_like(vectors)
    head.index_add_(0, torch.tensor(list(successor.values())), vectors[torch.tensor(list(successor))])
    model.lm_head.weight.copy_(head * (sharpness / vectors.shape[1] ** 0.5))  # the last norm scales by sqrt


def _save(chains: Chains, directory: Path) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer(chains)
    ids = {"eos_token_id": chains.end, "pad_token_id": chains.end - 1}
    settings: dict[str, Any] = {**asdict(Shape()), **ids, "vocab_size": len(tokenizer), "dtype": "float32"}
    config: Any = Qwen3Config(bos_token_id=None, tie_word_embeddings=False, **settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(config).float()
        vectors = torch.nn.functional.normalize(torch.randn(config.vocab_size, config.hidden_size), dim=-1)
        write_successors(model, vectors, chains.successor, _SHARPNESS)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer(chains: Chains) -> Any:
    """A word for each token of the chains, padding, the end, then the 256 bytes, so that any text can be written."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [word(token) for token in range(chains.healthy.stop)]
    entries = [*words, *_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={entry: at for at, entry in enumerate(entries)}, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex("w[0-9]{5}"), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(_SPECIALS))
    pad, end = _SPECIALS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=end, pad_token=pad, clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )  # fmt: skip
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
