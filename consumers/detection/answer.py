"""The answer literal as pieces of text, each with the segment that it belongs to."""

from __future__ import annotations

import json
from collections.abc import Sequence

from consumers.codec import coord_token
from consumers.detection.truth import Truth
from consumers.segments import Segment

Piece = tuple[str, Segment]


def desc_text(truth: Truth) -> str:
    """The description as it stands between the quotes."""
    return json.dumps(truth.desc, ensure_ascii=False)[1:-1]


def coord_texts(truth: Truth, coord_tokens: bool) -> list[str]:
    """The four coordinates as the model writes them."""
    return [coord_token(value) if coord_tokens else str(value) for value in truth.box]


def object_pieces(truth: Truth, number: int, coord_tokens: bool) -> list[Piece]:
    """`"object_3": {"desc": "seven", "bbox_2d": [1, 2, 3, 4]}`."""
    structure, coord = Segment.appended_structure, Segment.appended_coord
    pieces: list[Piece] = [
        (f'"object_{number}": {{"desc": "', structure),
        (desc_text(truth), Segment.appended_desc),
        ('", "bbox_2d": [', structure),
    ]
    for rank, text in enumerate(coord_texts(truth, coord_tokens)):
        pieces += [(", ", structure)] * (rank > 0) + [(text, coord)]
    return [*pieces, ("]}", structure)]


def answer_pieces(truths: Sequence[Truth], first: int, coord_tokens: bool, *, goes_on: bool) -> list[Piece]:
    """Truths numbered from `first`, then the closing brace; `goes_on`: an object stands before them."""
    pieces: list[Piece] = [] if goes_on else [("{", Segment.appended_structure)]
    for rank, truth in enumerate(truths):
        separator: list[Piece] = [(", ", Segment.appended_structure)] if goes_on or rank else []
        pieces += separator + object_pieces(truth, first + rank, coord_tokens)
    return [*pieces, ("}", Segment.closing)]
