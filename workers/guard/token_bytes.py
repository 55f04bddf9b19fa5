"""What each token id of a tokenizer writes: the table from ids to bytes in which the guard counts.

- Bytes are those inside a text. The space that many tokenizers drop at the very beginning of a text stays.
- Special and added tokens are spelled out; an id that the tokenizer does not know writes nothing.
- A tokenizer that has no spaces in its pieces (WordPiece, `</w>`, whole words) puts them between words when it decodes,
  wherever they were. Its text is compared without white space.
- A kind of tokenizer that is not here is refused, never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import GuardImpossible

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
_MARK = "▁"  # a space in SentencePiece's pieces

_Spell = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`pieces[id]`: what the id writes."""

    pieces: list[bytes]
    has_spaces: bool = True  # False: the pieces are words, and nothing says where a space was

    def of_text(self, text: str) -> bytes:
        """A text as the pieces would write it."""
        return (text if self.has_spaces else "".join(text.split())).encode()


def token_bytes(tokenizer: Any) -> TokenBytes:
    """The table of any tokenizer that a backend loads. Raises GuardImpossible for a kind that is not known."""
    if (core := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        return _of_tokenizers(core)
    if (core := _mistral_core(tokenizer)) is not None:
        return _of_mistral(core)
    return _of_python(tokenizer)


def _of_tokenizers(core: Any) -> TokenBytes:
    """Of the `tokenizers` library: its decoder says how pieces are spelled."""
    decoder = None if core.decoder is None else json.loads(core.decoder.__getstate__())
    steps: list[Mapping[str, Any]] = [] if decoder is None else decoder.get("decoders", [decoder])
    by_id = {index: piece for piece, index in core.get_vocab(with_added_tokens=True).items()}
    added = {index: token.content for index, token in core.get_added_tokens_decoder().items()}
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return TokenBytes(_pieces(by_id, _byte_level, added))
    words = not steps or bool(kinds & {"WordPiece", "BPEDecoder"})
    return TokenBytes(_pieces(by_id, _spelling(steps)), has_spaces=not words)


def _spelling(steps: list[Mapping[str, Any]]) -> _Spell:
    """A piece through the steps of a decoder that look at one piece each."""
    changes: list[Callable[[str], str]] = []
    bytes_too = fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "ByteFallback":
            bytes_too = True
        elif kind == "Metaspace":
            changes.append(_replaced(step["replacement"], " "))
        elif kind == "Replace" and "String" in step["pattern"]:
            changes.append(_replaced(step["pattern"]["String"], step["content"]))
        elif kind == "WordPiece":
            changes.append(_without_prefix(step["prefix"]))
        elif kind == "BPEDecoder":
            changes.append(_replaced(step["suffix"], ""))
        elif kind != "Strip" or not fused:  # of a whole text, it strips the beginning and the end alone
            raise _unknown(f"its decoder has the step {json.dumps(step)[:80]}")

    def spell(piece: str) -> bytes:
        if bytes_too and (found := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        for change in changes:
            piece = change(piece)
        return piece.encode()

    return spell


def _replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda piece: piece.replace(old, new)


def _without_prefix(prefix: str) -> Callable[[str], str]:
    return lambda piece: piece.removeprefix(prefix)


def _of_python(tokenizer: Any) -> TokenBytes:
    """Of a tokenizer written in Python: byte-level (GPT-2's alphabet, or bytes as they are) or SentencePiece."""
    pieces: list[Any] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    added = {index: str(token) for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    if any(isinstance(piece, bytes) for piece in pieces):
        whole = [piece if isinstance(piece, bytes) else str(piece or "").encode() for piece in pieces]
        return TokenBytes([added[at].encode() if at in added else piece for at, piece in enumerate(whole)])
    by_id = {at: piece for at, piece in enumerate(pieces) if piece is not None}
    if hasattr(tokenizer, "byte_decoder"):
        return TokenBytes(_pieces(by_id, _byte_level, added))
    if hasattr(tokenizer, "sp_model"):
        return TokenBytes(_pieces(by_id, _sentencepiece, added))
    raise _unknown(f"{type(tokenizer).__name__} does not say how its pieces are spelled")


def _mistral_core(tokenizer: Any) -> Any:
    """Of Mistral's own library, inside the wrappers of transformers and of vLLM."""
    wrapped = getattr(tokenizer, "transformers_tokenizer", tokenizer)
    instruct = getattr(getattr(wrapped, "tokenizer", None), "instruct_tokenizer", None)
    return None if instruct is None else instruct.tokenizer


def _of_mistral(core: Any) -> TokenBytes:
    ids = range(core.n_words)
    if not hasattr(core, "id_to_byte_piece"):
        return TokenBytes([_sentencepiece(core.id_to_piece(at)) for at in ids])
    return TokenBytes(
        [core.id_to_piece(at).encode() if core.is_special(at) else core.id_to_byte_piece(at) for at in ids]
    )


_sentencepiece = _spelling([{"type": "ByteFallback"}, {"type": "Metaspace", "replacement": _MARK}])


def _pieces(by_id: Mapping[int, str], spell: _Spell, spelled: Mapping[int, str] | None = None) -> list[bytes]:
    """By id, gaps empty; `spelled` ids are written as they stand."""
    as_they_stand = {} if spelled is None else spelled
    found = [b""] * (1 + max((*by_id, *as_they_stand), default=-1))
    for index, piece in by_id.items():
        found[index] = spell(piece)
    for index, text in as_they_stand.items():
        found[index] = text.encode()
    return found


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for what follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[letter] for letter in piece])
    except KeyError:  # not of this alphabet: the library writes such a piece as it stands
        return piece.encode()


def _unknown(why: str) -> GuardImpossible:
    return GuardImpossible(
        f"repeat_terminate.max_object_keys counts in the bytes that tokens write, and this tokenizer is of a kind that "
        f"the guard does not know: {why}; set max_object_keys to null"
    )
