"""Truth labels on sampled tokens.

- The truth's spelling of a value is tokenised in its context and laid beside the value's sampled tokens.
- Equal counts: label position by position. Otherwise: up to and with the first token that differs, the rest
  of the value is off. Where the truth is longer than the sample, that token stands right after the value.
- A token that also holds neighbouring characters gets a label that spells them too; values that share a token
  are labelled together. Where no such label exists, the value is off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from consumers.spans import begins_torn, covering
from consumers.task import TextCodec

_LEFT_TOKENS = 16
_RIGHT_CHARS = 48
"""Context that a pre-tokenizer may look at; more of it would only cost time."""


class Edit(NamedTuple):
    """Characters [start, stop) of the sampled text, and the truth's text for them."""

    span: tuple[int, int]
    text: str


class _Group(NamedTuple):
    first: int  # tokens, inclusive
    last: int
    edits: list[Edit]


class Sampled(NamedTuple):
    """The sampled side: shapes (len(token_ids),)."""

    text: str
    token_ids: Sequence[int]
    ends: Sequence[int]


def truth_labels(codec: TextCodec, sampled: Sampled, edits: Sequence[Edit]) -> dict[int, int | None]:
    """Label per position of every edited value, None where it is off; other positions are absent."""
    labels: dict[int, int | None] = {}
    for group in _groups(sampled, edits):
        wanted, whole = _wanted(codec, sampled, group)
        for position, label in _lay(sampled.token_ids, group, wanted, whole):
            labels.setdefault(position, label)
    return labels


def _groups(sampled: Sampled, edits: Sequence[Edit]) -> list[_Group]:
    """Edits in order, those that share a token together."""
    groups: list[_Group] = []
    for edit in edits:
        first, last = covering(sampled.ends, *edit.span)
        if groups and first <= groups[-1].last:
            before = groups.pop()
            groups.append(_Group(before.first, max(last, before.last), [*before.edits, edit]))
        else:
            groups.append(_Group(first, last, [edit]))
    return groups


def _wanted(codec: TextCodec, sampled: Sampled, group: _Group) -> tuple[list[int], int | None]:
    """The truth's tokens from the group's first token on, and how many of them spell exactly the group."""
    if begins_torn(codec, sampled.token_ids, group.first):
        return [], None
    start = sampled.ends[group.first - 1] if group.first else 0
    stop = sampled.ends[group.last]
    middle = _replaced(sampled.text, start, stop, group.edits)
    left_token = max(0, group.first - _LEFT_TOKENS)
    left = sampled.text[sampled.ends[left_token - 1] if left_token else 0 : start]
    right = sampled.text[stop : stop + _RIGHT_CHARS]
    for context in (left, ""):
        stream = codec.encode(context + middle + right)
        ends = codec.char_ends(stream)
        skip = bisect_left(ends, len(context)) + 1 if context else 0
        if context and ends[skip - 1] != len(context):
            continue
        if codec.decode(stream[skip:]) != middle + right:
            continue
        border = bisect_left(ends, len(context) + len(middle))
        whole = ends[border] == len(context) + len(middle)
        return stream[skip:], border + 1 - skip if whole else None
    return [], None


def _replaced(text: str, start: int, stop: int, edits: Sequence[Edit]) -> str:
    parts: list[str] = []
    for (begin, end), new in edits:
        parts += [text[start:begin], new]
        start = end
    return "".join(parts) + text[start:stop]


def _lay(
    token_ids: Sequence[int], group: _Group, wanted: Sequence[int], whole: int | None
) -> list[tuple[int, int | None]]:
    """(position, label) of the group; also of the token after it when the truth goes on there."""
    positions = range(group.first, group.last + 1)
    if whole == len(positions):
        return list(zip(positions, wanted, strict=False))
    laid: list[tuple[int, int | None]] = []
    going = True
    for at in positions:
        rank = at - group.first
        going = going and rank < len(wanted)
        laid.append((at, wanted[rank] if going else None))
        going = going and wanted[rank] == token_ids[at]
    after, rank = group.last + 1, len(positions)
    if going and rank < len(wanted) and after < len(token_ids) and wanted[rank] != token_ids[after]:
        laid.append((after, wanted[rank]))
    return laid
