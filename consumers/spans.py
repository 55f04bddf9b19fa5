"""Characters ↔ tokens. A token covers the characters it completes; a torn one belongs to what it begins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from consumers.task import TextCodec
from pipeline.wire.messages import SequenceResult

_MOST_TORN = 5  # a character has at most 4 bytes, hence at most 4 tokens


def last_turn(result: SequenceResult) -> tuple[int, int]:
    """First token and end of the last turn that the policy sampled; an end that a guard forced is not part of it."""
    at, turn = 0, (0, 0)
    for value, count in result.response_mask.runs or ((1, len(result.token_ids)),):
        if value == 1:
            turn = (turn[0] if turn[1] == at else at, at + count)
        at += count
    return turn


def answer_ids(result: SequenceResult, codec: TextCodec) -> list[int]:
    """The sampled ids of the last turn, before its terminator."""
    stops = set(codec.eos_token_ids)
    start, end = last_turn(result)
    ids = list(result.token_ids[start:end])
    return ids[: next((at for at, token in enumerate(ids) if token in stops), len(ids))]


def covering(ends: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """First and last token (inclusive) that hold characters [start, stop), which must not be empty."""
    first = bisect_left(ends, start) if start else 0
    if start and ends[first] == start:
        first += 1
    return first, bisect_left(ends, stop)


def clean_cut(codec: TextCodec, ids: Sequence[int], text: str, cut: int) -> tuple[int, int]:
    """The most tokens that spell a beginning of text[:cut], and how many characters they spell.

    One token less than the cut needs when that token straddles it; fewer still only where a character's bytes
    are torn apart at the border.
    """
    if cut == 0:
        return 0, 0
    ends = codec.char_ends(ids)
    count = bisect_left(ends, cut) + 1
    if ends[count - 1] > cut:
        count -= 1
    for kept in range(count, max(0, count - _MOST_TORN), -1):
        if codec.decode(ids[:kept]) == text[: ends[kept - 1]]:
            return kept, ends[kept - 1]
    return 0, 0


def begins_torn(codec: TextCodec, ids: Sequence[int], at: int) -> bool:
    """Whether the token before `at` ends inside a character."""
    return at > 0 and codec.decode(ids[at - 1 : at]).endswith("\ufffd")
