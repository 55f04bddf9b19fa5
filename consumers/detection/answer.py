"""The answer literal as pieces of text, each with the segment that it belongs to."""

from __future__ import annotations

import json
from collections.abc import Sequence

from consumers.codec import coord_token
from consumers.detection.geometry import Geometry
from consumers.detection.grammar import OBJECT_N, Grammar
from consumers.detection.truth import Truth
from consumers.segments import Segment

Piece = tuple[str, Segment]


def desc_text(truth: Truth) -> str:
    """The description as it stands between the quotes."""
    return json.dumps(truth.desc, ensure_ascii=False)[1:-1]


def coord_texts(geometry: Geometry, coord_tokens: bool) -> list[str]:
    """The coordinates as the model writes them."""
    return [coord_token(value) if coord_tokens else str(value) for value in geometry.coords]


def geometry_pieces(geometry: Geometry, coord_tokens: bool) -> list[Piece]:
    """`"bbox_2d": [1, 2, 3, 4]`, `"poly": [1, 2, 3, 4, 5, 6]` or `"poly": [[1, 2], [3, 4], [5, 6]]`."""
    structure, open_, close = Segment.appended_structure, "[", "]"
    pieces: list[Piece] = [(f'"{geometry.kind}": ', structure)]
    for rank, text in enumerate(coord_texts(geometry, coord_tokens)):
        begins_pair = geometry.in_pairs and rank % 2 == 0
        before = open_ if rank == 0 else "], [" if begins_pair else ", "
        pieces += [(open_ + before if begins_pair and rank == 0 else before, structure), (text, Segment.appended_coord)]
    return [*pieces, (close + close if geometry.in_pairs else close, structure)]


def geometry_text(geometry: Geometry, coord_tokens: bool) -> str:
    """The same as one text."""
    return "".join(text for text, _ in geometry_pieces(geometry, coord_tokens))


def object_pieces(truth: Truth, coord_tokens: bool, name: str = "") -> list[Piece]:
    """`{"desc": "seven", "bbox_2d": [1, 2, 3, 4]}`, after `"object_3": ` if that is its name."""
    structure = Segment.appended_structure
    desc: list[Piece] = [('"desc": "', structure), (desc_text(truth), Segment.appended_desc), ('"', structure)]
    geometry = geometry_pieces(truth.geometry, coord_tokens)
    first, second = (desc, geometry) if truth.is_desc_first else (geometry, desc)
    opening = f'"{name}": {{' if name else "{"
    return [(opening, structure), *first, (", ", structure), *second, ("}", structure)]


def answer_pieces(
    truths: Sequence[Truth], first: int, coord_tokens: bool, *, goes_on: bool, grammar: Grammar = OBJECT_N
) -> list[Piece]:
    """Truths, numbered from `first` if the grammar numbers them, then the end; `goes_on`: an object is before them."""
    pieces: list[Piece] = [] if goes_on else [(grammar.opening, Segment.appended_structure)]
    for rank, truth in enumerate(truths):
        separator: list[Piece] = [(", ", Segment.appended_structure)] if goes_on or rank else []
        name = f"object_{first + rank}" if grammar.is_numbered else ""
        pieces += separator + object_pieces(truth, coord_tokens, name)
    return [*pieces, (grammar.closing, Segment.closing)]
