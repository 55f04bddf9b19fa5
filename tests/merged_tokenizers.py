"""Real tokenizers of every family, trained here on answers: what they merge crosses the borders of JSON keys."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from sluice.consumers.tasks.codec import NUM_COORDS, HFTextCodec, coord_token
from tests.tiny_models import wrapped

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pre-tokenizer's regular expression of Qwen2 and Qwen3."""

BOX = "<|box|>"
"""A special token of every tokenizer here."""

_WORDS = ("cat", "a big dog", "café", "naïve", "東京", "🙂🙃", 'the "old" one')
_MARK = "▁"


def corpus() -> list[str]:
    """Answers of a detection task in the layouts in which models write JSON."""
    texts: list[str] = []
    for at in range(200):
        entry = {"desc": _WORDS[at % len(_WORDS)], "bbox_2d": [(at * step) % 1000 for step in (7, 13, 29, 31)]}
        answer = {f"object_{at % 12 + number}": entry for number in range(3)}
        listed = {"objects": [entry, entry]}
        for tree in (answer, listed):
            texts += [json.dumps(tree, ensure_ascii=False), json.dumps(tree, separators=(",", ":"))]
            texts.append(json.dumps(tree, indent=2, ensure_ascii=False))
    return texts


def qwen_like(vocab_size: int = 480) -> Any:
    """Byte-level BPE with Qwen2's split: `{"`, ` "` and `":` are tokens, and a key has none of its own."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(core, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False))
    return wrapped(core, [BOX])


def whole_lines() -> Any:
    """Byte-level BPE without any split: tokens hold several keys, parts of two, and halves of characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(core, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    return wrapped(core, [BOX])


def llama_like() -> Any:
    """SentencePiece's BPE: spaces are marked, other bytes have pieces of their own; some characters have none."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), normalizers.Replace(" ", _MARK)])
    core.decoder = decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    known = [*map(chr, range(0x20, 0x7F)), _MARK, "\n", "é", "ï", "東"]  # of as many the trainer takes any
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *fallback], initial_alphabet=known, show_progress=False,
        limit_alphabet=len(known),
    )  # fmt: skip
    core.train_from_iterator(corpus(), trainer)
    tree = json.loads(core.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] == "<unk>"]
    return wrapped(Tokenizer.from_str(json.dumps(tree)), [BOX])


def unigram() -> Any:
    """SentencePiece's Unigram, as in T5; what it does not know is one token."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    _train(core, trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>"))
    return wrapped(core, [BOX])


def wordpiece() -> Any:
    """As in BERT: `##` marks what goes on, and no piece has a space."""
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    _train(core, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False))
    return wrapped(core, [BOX])


def word_ends() -> Any:
    """As in GPT-1: `</w>` marks the end of a word, and no piece has a space."""
    core = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.BPEDecoder("</w>")
    special = ["<unk>"]
    _train(
        core,
        trainers.BpeTrainer(vocab_size=500, special_tokens=special, end_of_word_suffix="</w>", show_progress=False),
    )
    return wrapped(core, [BOX])


FAMILIES: dict[str, Callable[[], Any]] = {
    each.__name__: functools.cache(each) for each in (qwen_like, whole_lines, llama_like, unigram, wordpiece, word_ends)
}


@functools.cache
def family_codec(family: str, *, coord_tokens: bool = False) -> HFTextCodec:
    """The codec of a model directory with this tokenizer."""
    tokenizer = copy.deepcopy(FAMILIES[family]())
    if coord_tokens:
        tokenizer.add_tokens([coord_token(value) for value in range(NUM_COORDS)], special_tokens=True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return HFTextCodec(folder)


def _train(core: Tokenizer, trainer: Any) -> None:
    core.train_from_iterator(corpus(), trainer)
