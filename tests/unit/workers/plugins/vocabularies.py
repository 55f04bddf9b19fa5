"""Real tokenizers of several kinds, and every way to spell a text in their tokens."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import build_tokenizer
from tests.tiny_tokenizer import save_tiny_tokenizer

KINDS = ("plain", "words", "merged", "coords", "odd")
ODD = ("{}", "{},{}", "},{}", '},{"a":1}', "}}", "}]", '"}', '1},{"a":', " }", "\n}", "} ]x", '\\"}', "],{}", '[{"')
ODD_BYTES = (b'\xb1"}', b"}\xe6\x9d", b"\xb1\xe6", b'\x9d\xb1"},{}')


def _alphabet() -> dict[int, str]:
    """Byte -> the character that stands for it in a byte-level vocabulary."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def _odd_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens that close and open several objects at once, or that begin inside a character."""
    letters = _alphabet()
    vocab = {letter: at for at, letter in enumerate(sorted(letters.values()))}
    merges: list[tuple[str, str]] = []
    for raw in [*(text.encode() for text in ODD), *ODD_BYTES]:
        piece = letters[raw[0]]
        for byte in raw[1:]:
            merges.append((piece, letters[byte]))
            piece += letters[byte]
            vocab.setdefault(piece, len(vocab))
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """`plain` (few merges), `words`, `coords`, `merged` (trained), `odd`, `pieces` (SentencePiece style)."""
    if kind == "plain":
        return build_tokenizer()
    if kind == "odd":
        return _odd_tokenizer()
    if kind == "pieces":
        return _pieces_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_tokenizer(Path(folder), coord_tokens=kind == "coords", split=kind != "merged")
        return PreTrainedTokenizerFast.from_pretrained(folder)


def _pieces_tokenizer() -> PreTrainedTokenizerFast:
    """`▁` for a space, dropped at the start of a text; characters out of the vocabulary as byte tokens."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", '▁"', '"}', '▁"a', "}", "▁}", "},", "▁{"]
    pieces += [letter for letter in '{[]:,"ab12' if letter not in pieces]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", '"'), ("▁", "{")], byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@functools.cache
def _by_bytes(kind: str) -> tuple[dict[bytes, int], int]:
    """(token bytes -> id, longest) of a byte-level vocabulary, special tokens left out."""
    bytes_of = {letter: byte for byte, letter in _alphabet().items()}
    tokens = {
        bytes(bytes_of[letter] for letter in token): token_id
        for token, token_id in tokenizer_of(kind).get_vocab().items()
        if not token.startswith("<|")
    }
    return tokens, max(map(len, tokens))


def spell(kind: str, text: str, drawn: random.Random) -> list[tuple[int, int]]:
    """(token, bytes of the text up to and with it): any tokens that spell the text, cut inside characters too."""
    tokens, longest = _by_bytes(kind)
    raw, at, spelled = text.encode(), 0, []
    while at < len(raw):
        fits = [size for size in range(1, longest + 1) if at + size <= len(raw) and raw[at : at + size] in tokens]
        size = drawn.choice((drawn.choice(fits), fits[-1]))
        at += size
        spelled.append((tokens[raw[at - size : at]], at))
    return spelled


def grown(prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[torch.Tensor]:
    """`input_ids` (1, prompt + generated) after 1, 2, … generated tokens."""
    for count in range(1, len(tokens) + 1):
        yield torch.tensor([[*prompt, *tokens[:count]]])
