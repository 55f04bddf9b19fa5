"""Counts occurrences of `object_key_prefix` in the bytes of generated tokens, token by token.

- The Knuth-Morris-Pratt automaton over bytes, mapped to token ids once at start: for each id and each number of bytes
  matched before it, how many are matched after it and how many occurrences ended inside. So a token costs one look-up,
  whatever it writes, and a character or prefix that straddles tokens is no special case.
- Left to right, without overlap: after an occurrence the match restarts from zero.
- The table is proved on the tokenizer itself: an answer with K keys is tokenized, and K must be counted.

`token_bytes` makes the table from ids to the bytes the guard counts in:

- Bytes are those inside a text. The space that many tokenizers drop at the very beginning of a text is kept.
- Special and added tokens are spelled out; an id the tokenizer doesn't know writes nothing.
- A tokenizer without spaces in its pieces (WordPiece, `</w>`, whole words) puts them between words when decoding,
  wherever they originally were. Its text is compared without white space.
- An unsupported kind of tokenizer is refused, never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from sluice.pipeline.errors import GuardImpossible

_LONGEST_PROOF = 1000  # keys
_ANSWER_KEYS = 8
_LAYOUTS = (("{", '": ', ", ", "}"), ("{", '":', ",", "}"), ("[\n  {\n    ", '": ', ",\n    ", "\n  }\n]\n"))
"""What opens an answer, follows a key, stands between entries and closes it: tokens merge otherwise in each of them."""

Move = tuple[tuple[int, int], ...]
"""By bytes matched before a token: (bytes matched after it, occurrences that ended in it)."""
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
_MARK = "▁"  # a space in SentencePiece's pieces
_Spell = Callable[[str], bytes]


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    known: int
    moves: list[tuple[list[tuple[int, int]], list[int]]]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class ObjectKeys:
    """The automaton of one tokenizer and one prefix.

    `moves`: by token id. A missing id below `known` resets the match to zero; an id beyond `known` writes nothing and
    keeps it. `answer`: the tokens of a rendered answer with at least one key, to prove a loaded guard with.
    """

    moves: Mapping[int, Move]
    known: int
    answer: tuple[int, ...] = ()

    @classmethod
    def of(cls, pattern: bytes, pieces: Sequence[bytes], answer: Iterable[int] = ()) -> ObjectKeys:
        """`pieces`: by token id; `pattern` must not be empty."""
        byte_moves = _byte_moves(pattern)
        begins = tuple(pattern[:length] for length in range(1, len(pattern)))
        ends = tuple(pattern[at:] for at in range(1, len(pattern)))
        shared: dict[Move, Move] = {}  # most relevant tokens share one of a few moves
        moves: dict[int, Move] = {}
        for index, piece in enumerate(pieces):
            if piece in pattern or pattern in piece or piece.endswith(begins) or piece.startswith(ends):
                move = tuple(_moved(byte_moves, piece, matched) for matched in range(len(pattern)))
                moves[index] = shared.setdefault(move, move)
        return cls(moves, len(pieces), tuple(answer))

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, prefix: str, max_keys: int) -> ObjectKeys:
        """The proved automaton. Raises GuardImpossible if keys the tokenizer writes would not be counted."""
        written = token_bytes(tokenizer)
        pattern = written.of_text(prefix)
        if not pattern:
            raise _uncountable(prefix, "has no bytes in this model's vocabulary, so nothing can be counted")
        answer = _encoded(tokenizer, _answer(prefix, min(max_keys, _ANSWER_KEYS)))
        keys = cls.of(pattern, written.pieces, answer)
        for layout in range(len(_LAYOUTS)):
            text = _answer(prefix, min(max_keys, _LONGEST_PROOF), layout)
            _prove(keys, tokenizer, prefix, text, written)
        return keys

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ObjectKeys:
        """The inverse of `plain`. Raises msgspec.ValidationError for anything else."""
        found = msgspec.convert(plain, _Plain)
        moves = [(tuple(move), indices) for move, indices in found.moves]
        return cls({index: move for move, indices in moves for index in indices}, found.known, found.answer)

    def plain(self) -> dict[str, Any]:
        """As plain values, for another process: each distinct move once, with its ids."""
        indices: dict[Move, list[int]] = {}
        for index, move in self.moves.items():
            indices.setdefault(move, []).append(index)
        moves = [[[list(pair) for pair in move], ids] for move, ids in indices.items()]
        return {"known": self.known, "moves": moves, "answer": list(self.answer)}

    @cached_property
    def most_in_a_token(self) -> int:
        """The most occurrences that can end in one token."""
        return max((found for move in self.moves.values() for _, found in move), default=0)

    def count(self, tokens: Iterable[int]) -> int:
        """Occurrences in these tokens."""
        matched = total = 0
        for token in tokens:
            matched, found = self.step(token, matched)
            total += found
        return total

    def step(self, token: int, matched: int) -> tuple[int, int]:
        """(bytes matched after the token, occurrences that ended in it)."""
        move = self.moves.get(token)
        if move is not None:
            return move[matched]
        return (0 if token < self.known else matched), 0


def _byte_moves(pattern: bytes) -> list[list[tuple[int, int]]]:
    """By bytes matched and next byte: (bytes matched then, 1 if an occurrence is complete)."""
    moves = [[(0, 0)] * 256 for _ in pattern]
    restart = 0  # the longest proper border of the matched bytes
    for matched, byte in enumerate(pattern):
        if matched:
            moves[matched] = list(moves[restart])
            after = moves[restart][byte][0]
        else:
            after = 0
        whole = matched + 1 == len(pattern)
        moves[matched][byte] = (0, 1) if whole else (matched + 1, 0)
        restart = after
    return moves


def _moved(byte_moves: list[list[tuple[int, int]]], piece: bytes, matched: int) -> tuple[int, int]:
    total = 0
    for byte in piece:
        matched, found = byte_moves[matched][byte]
        total += found
    return matched, total


def _answer(prefix: str, count: int, layout: int = 0) -> str:
    """A JSON answer with `count` keys; a prefix that can't begin a quoted key is used unchanged."""
    opening, colon, comma, closing = _LAYOUTS[layout]
    if prefix.count('"') % 2 == 0:
        colon = colon[1:]
        return opening + comma.join(f"{prefix}{colon}{number}" for number in range(1, count + 1)) + closing
    return opening + comma.join(f"{prefix}{number}{colon}{number}" for number in range(1, count + 1)) + closing


def _prove(keys: ObjectKeys, tokenizer: Any, prefix: str, text: str, written: TokenBytes) -> None:
    tokens = _encoded(tokenizer, text)
    wanted, counted = written.of_text(text).count(written.of_text(prefix)), keys.count(tokens)
    if counted != wanted:
        shown = b"".join(written.pieces[token] for token in tokens)[:60].decode(errors="replace")
        raise _uncountable(
            prefix,
            f"occurs {wanted} times in an answer, but {counted} times in its tokens: {text[:60]!r} becomes {shown!r}",
        )


def _encoded(tokenizer: Any, text: str) -> list[int]:
    # transformers warns about texts beyond the context; this one is never decoded
    quiet = {"verbose": False} if hasattr(tokenizer, "backend_tokenizer") else {}
    return list(tokenizer.encode(text, add_special_tokens=False, **quiet))


def _uncountable(prefix: str, why: str) -> GuardImpossible:
    return GuardImpossible(
        f"repeat_terminate.object_key_prefix {prefix!r} {why}; change it, or set max_object_keys to null"
    )


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`pieces[id]`: the bytes the id writes."""

    pieces: list[bytes]
    has_spaces: bool = True  # False: the pieces are words, and don't say where spaces were

    def of_text(self, text: str) -> bytes:
        """A text as the pieces would write it."""
        return (text if self.has_spaces else "".join(text.split())).encode()


def token_bytes(tokenizer: Any) -> TokenBytes:
    """The table of any tokenizer that a backend loads. Raises GuardImpossible for an unknown kind."""
    if (core := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        return _of_tokenizers(core)
    if (core := _mistral_core(tokenizer)) is not None:
        return _of_mistral(core)
    return _of_python(tokenizer)


def _of_tokenizers(core: Any) -> TokenBytes:
    """For the `tokenizers` library: its decoder says how pieces are spelled."""
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
    """Runs a piece through the decoder's per-piece steps."""
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
        elif kind != "Strip" or not fused:  # on the whole text it strips only the beginning and the end
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
    """For a tokenizer written in Python: byte-level (GPT-2's alphabet, or raw bytes) or SentencePiece."""
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
    raise _unknown(f"{type(tokenizer).__name__} does not expose the text of its tokens")


def _mistral_core(tokenizer: Any) -> Any:
    """The tokenizer of Mistral's own library, inside the wrappers of transformers and vLLM."""
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
    """By id, gaps empty; `spelled` ids are written literally."""
    as_they_stand = {} if spelled is None else spelled
    found = [b""] * (1 + max((*by_id, *as_they_stand), default=-1))
    for index, piece in by_id.items():
        found[index] = spell(piece)
    for index, text in as_they_stand.items():
        found[index] = text.encode()
    return found


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones map to themselves, the others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[letter] for letter in piece])
    except KeyError:  # not in this alphabet: the library writes such a piece literally
        return piece.encode()


def _unknown(why: str) -> GuardImpossible:
    return GuardImpossible(
        "repeat_terminate.max_object_keys counts in the bytes that tokens write, but the guard does not support this "
        f"tokenizer: {why}; set max_object_keys to null"
    )
