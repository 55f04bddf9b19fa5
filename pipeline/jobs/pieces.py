"""Pieces of progress as they lie in the broker: each with its length in front, one after the other."""

from __future__ import annotations

from pipeline.errors import MessageError
from pipeline.wire.messages import Progress, decode, encode
from pipeline.wire.tokens import FloatArray, Runs, TokenArray

_PREFIX = 4  # bytes, little-endian


def packed(piece: Progress) -> bytes:
    """One piece, ready to be appended."""
    raw = encode(piece)
    return len(raw).to_bytes(_PREFIX, "little") + raw


def joined(stored: bytes) -> Progress:
    """All pieces as one, from token 0. Raises MessageError when they do not fit together."""
    tokens, logprobs, versions = TokenArray(), FloatArray(), list[int]()
    at = 0
    while at < len(stored):
        size = int.from_bytes(stored[at : at + _PREFIX], "little")
        piece = decode(Progress, stored[at + _PREFIX : at + _PREFIX + size])
        if piece.offset != len(tokens):
            raise MessageError(f"progress: a piece starts at token {piece.offset}, {len(tokens)} were stored before")
        tokens.extend(piece.token_ids)
        logprobs.extend(piece.logprobs)
        versions += list(piece.versions)
        at += _PREFIX + size
    return Progress(offset=0, token_ids=tokens, logprobs=logprobs, versions=Runs.of(versions))
