"""Occurrences of `object_key_prefix` in the bytes of generated tokens, counted token by token.

- The automaton of Knuth, Morris and Pratt over bytes, taken to token ids once at the start: for each id and each number
  of bytes that are matched before it, how many are matched after it and how many occurrences ended inside. So a token
  costs one look-up, whatever it writes; a character or a prefix that straddles tokens is no special case.
- From left to right, none overlapping: after an occurrence the match starts from nothing.
- The table is proved on the tokenizer itself: an answer with K keys is tokenized, and K must be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from pipeline.errors import GuardImpossible
from workers.guard.token_bytes import TokenBytes, token_bytes

_LONGEST_PROOF = 1000  # keys
_ANSWER_KEYS = 8
_LAYOUTS = (("{", '": ', ", ", "}"), ("{", '":', ",", "}"), ("[\n  {\n    ", '": ', ",\n    ", "\n  }\n]\n"))
"""What opens an answer, follows a key, stands between entries and closes it: tokens merge otherwise in each of them."""

Move = tuple[tuple[int, int], ...]
"""By bytes matched before a token: (bytes matched after it, occurrences that ended in it)."""


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    known: int
    moves: list[tuple[list[tuple[int, int]], list[int]]]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class ObjectKeys:
    """The automaton of one tokenizer and one prefix.

    `moves`: by token id; an id below `known` that is not there matches nothing and leaves nothing matched, one beyond
    writes nothing. `answer`: the tokens of a rendered answer with at least one key, to prove a loaded guard with.
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
        shared: dict[Move, Move] = {}  # most tokens that matter do so in one of a few ways
        moves: dict[int, Move] = {}
        for index, piece in enumerate(pieces):
            if piece in pattern or pattern in piece or piece.endswith(begins) or piece.startswith(ends):
                move = tuple(_moved(byte_moves, piece, matched) for matched in range(len(pattern)))
                moves[index] = shared.setdefault(move, move)
        return cls(moves, len(pieces), tuple(answer))

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, prefix: str, max_keys: int) -> ObjectKeys:
        """Proved. Raises GuardImpossible where keys that the tokenizer writes would not be counted."""
        written = token_bytes(tokenizer)
        pattern = written.of_text(prefix)
        if not pattern:
            raise _uncountable(prefix, "has no bytes in this model's vocabulary, so nothing could be counted")
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
        """As plain values, for another process: each move once, with its ids."""
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
    """By bytes matched and next byte: (bytes matched then, 1 where an occurrence is whole)."""
    moves = [[(0, 0)] * 256 for _ in pattern]
    restart = 0  # the longest proper border of what is matched
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
    """A JSON answer of so many keys; a prefix that is no beginning of a quoted key stands as it is."""
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
            f"stands {wanted} times in an answer, and {counted} times in the tokens that this model's tokenizer makes "
            f"of it: {text[:60]!r} becomes {shown!r}",
        )


def _encoded(tokenizer: Any, text: str) -> list[int]:
    # transformers warns of a text beyond the context, and nobody is going to decode this one
    quiet = {"verbose": False} if hasattr(tokenizer, "backend_tokenizer") else {}
    return list(tokenizer.encode(text, add_special_tokens=False, **quiet))


def _uncountable(prefix: str, why: str) -> GuardImpossible:
    return GuardImpossible(
        f"repeat_terminate.object_key_prefix {prefix!r} {why}; change it, or set max_object_keys to null"
    )
