"""Tokenizers that are not of the `tokenizers` library: Mistral's own, SentencePiece in Python, tiktoken behind a class.

The files are those that mistral_common brings along: 131,072 and 32,768 real tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice.workers.guard.object_keys import token_bytes
from tests.merged_tokenizers import FAMILIES


def _mistral_file(name: str) -> str:
    import mistral_common

    return str(Path(mistral_common.__file__).parent / "data" / name)


def mistral_tekken() -> Any:
    from transformers.tokenization_mistral_common import MistralCommonBackend

    return MistralCommonBackend(_mistral_file("tekken_240911.json"))


def mistral_in_vllm() -> Any:
    from vllm.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer(mistral_tekken())


def mistral_sentencepiece() -> Any:
    from transformers.tokenization_mistral_common import MistralCommonBackend

    return MistralCommonBackend(_mistral_file("mistral_instruct_tokenizer_240323.model.v3"))


def sentencepiece_in_python() -> Any:
    from transformers import GPTSw3Tokenizer

    return GPTSw3Tokenizer(_mistral_file("mistral_instruct_tokenizer_240323.model.v3"))


class BytesAsTheyAre:
    """As the first Qwen's: tiktoken behind it, pieces are bytes."""

    def __init__(self) -> None:
        import tiktoken

        pieces = [piece for piece in token_bytes(FAMILIES["whole_lines"]()).pieces if not piece.startswith(b"<|")]
        ranks = {piece: rank for rank, piece in enumerate(pieces)}
        self._core = tiktoken.Encoding("lines", pat_str="(?s).+", mergeable_ranks=ranks, special_tokens={"<|e|>": 900})

    def __len__(self) -> int:
        return self._core.n_vocab

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._core.encode(text)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[Any]:
        known = len(self._core.token_byte_values())
        return [self._core.decode_single_token_bytes(at) if at < known else "<|e|>" for at in ids]


class Letters(BytesAsTheyAre):
    """As Kimi's: the same, its pieces in GPT-2's letters."""

    def __init__(self) -> None:
        super().__init__()
        fast = FAMILIES["whole_lines"]()
        self._letters = {token_bytes(fast).pieces[at]: piece for piece, at in fast.get_vocab().items()}
        self.byte_decoder = {"Ġ": 32}  # by which it is known

    def convert_ids_to_tokens(self, ids: list[int]) -> list[Any]:
        return [self._letters.get(piece, piece) for piece in super().convert_ids_to_tokens(ids)]


class Unknown(BytesAsTheyAre):
    """Pieces that say nothing of bytes."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[Any]:
        return [f"piece-{at}" for at in ids]
