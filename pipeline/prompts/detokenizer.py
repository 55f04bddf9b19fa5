"""Token ids back to text, as clients and stop strings see it: without special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any


class TextDecoder:
    """Token ids to text without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        core: Any = getattr(tokenizer, "backend_tokenizer", None)
        if core is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
            core = tokenizer  # several times as slow
        self._decode: Any = partial(core.decode, skip_special_tokens=True)
        pieces = [f"<0x{byte:02X}>" for byte in range(256)] if has_byte_fallback(tokenizer) else []
        ids = (tokenizer.convert_tokens_to_ids(piece) for piece in pieces)
        self.byte_ids = frozenset(token for token in ids if token is not None and token != tokenizer.unk_token_id)
        """SentencePiece's bytes. A run of them is decoded as a whole: one bad byte makes all of it U+FFFD."""

    def __call__(self, token_ids: Sequence[int], /) -> str:
        return self._decode(token_ids)


def has_byte_fallback(tokenizer: Any) -> bool:
    """Whether bytes stand for what its vocabulary lacks, as in SentencePiece's models."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and b'"ByteFallback"' in decoder.__getstate__()
