"""Small real byte-level tokenizers, whose merges cross the borders that token labels care about."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sluice.consumers.tasks.codec import HFTextCodec, coord_token

TURN_END = "<|im_end|>"
SPECIALS = ["<|endoftext|>", "<|im_start|>", TURN_END]
WORDS = ("seven", "nine", "zero", "eight", "café", "naïve", "東京", "🙂🙃", "a big dog", 'say "hi"')


def _corpus() -> list[str]:
    lines = []
    for at in range(300):
        word = WORDS[at % len(WORDS)].replace('"', '\\"')
        box = [(at * step) % 1000 for step in (7, 13, 29, 31)]
        one = f'{{"desc": "{word}", "bbox_2d": {box}}}'
        lines.append(f'{{"object_{at % 12}": {one}, "object_{at % 12 + 1}": {one}}}')
    return lines


def _build(coord_tokens: bool, split: bool, vocab_size: int) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    core.decoder = decoders.ByteLevel()
    extra = [coord_token(value) for value in range(1000)] if coord_tokens else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size + len(extra),
        special_tokens=SPECIALS + extra,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=6 if not split else None,
    )
    core.train_from_iterator(_corpus(), trainer)
    return core


def save_tiny_tokenizer(directory: Path, *, coord_tokens: bool = False, split: bool = True, size: int = 600) -> None:
    """Train and save; `split=False` merges across words, digits and punctuation alike."""
    PreTrainedTokenizerFast(
        tokenizer_object=_build(coord_tokens, split, size),
        eos_token=TURN_END,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


@functools.cache
def tiny_codec(kind: str = "words") -> HFTextCodec:
    """`words` (GPT-2 like), `coords` (with coordinate tokens), `merged` (tokens hold structure and value), `bytes`."""
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_tokenizer(
            Path(folder),
            coord_tokens=kind == "coords",
            split=kind not in ("merged",),
            size=259 if kind == "bytes" else 600,
        )
        return HFTextCodec(folder)
