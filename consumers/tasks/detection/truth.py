"""The truth of a detection prompt: validated, and as the model would write it.

A list of {desc, bbox_2d}; with the grammar `objects` also of {desc, poly}. Its literal is built from pieces of text,
each with its segment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.consumers.tasks.codec import coord_token, normalized
from sluice.consumers.tasks.detection.geometry import Box, Geometry, is_box, is_polygon
from sluice.consumers.tasks.detection.grammar import OBJECT_N, Grammar
from sluice.consumers.tasks.segments import Segment
from sluice.consumers.tasks.task import TextCodec
from sluice.pipeline.errors import TaskError

Piece = tuple[str, Segment]


@dataclass(frozen=True)
class Truth:
    """One true object."""

    desc: str  # in the tokenizer's Unicode form, so that its tokens have as many characters
    geometry: Geometry
    is_desc_first: bool = True  # key order in the row

    @property
    def box(self) -> Box:
        """The box used for matching."""
        return self.geometry.box


def read_truths(truth: Any, where: str, codec: TextCodec, grammar: Grammar = OBJECT_N) -> list[Truth]:
    """The truths in order; raises TaskError that says which item is wrong, why, and how to fix it."""
    if not isinstance(truth, list | tuple):
        raise TaskError(f"{where}: truth is {type(truth).__name__}; give a list of {_keys(grammar)}")
    return [_read(item, f"{where}: truth[{index}]", codec, grammar) for index, item in enumerate(truth)]


def _read(item: Any, where: str, codec: TextCodec, grammar: Grammar) -> Truth:
    kind = next((name for name in grammar.geometries if isinstance(item, dict) and set(item) == {"desc", name}), None)
    if kind is None:
        found = sorted(map(str, item)) if isinstance(item, dict) else type(item).__name__
        raise TaskError(f"{where} has {found}; give exactly the keys desc and {' or '.join(grammar.geometries)}")
    desc = item["desc"]
    if not isinstance(desc, str) or not desc.strip():
        raise TaskError(f"{where}.desc is {desc!r:.80}; give a non-empty string")
    try:
        terminators = set(codec.encode(desc)) & set(codec.eos_token_ids)
    except (UnicodeEncodeError, TypeError) as error:
        raise TaskError(f"{where}.desc is not valid Unicode ({error}); remove the lone surrogate") from error
    if terminators:
        raise TaskError(f"{where}.desc {desc!r:.80} contains a turn terminator; remove it")
    geometry = _polygon(item[kind], where) if kind == "poly" else _box(item[kind], where)
    # Keys are written in the order of the row; the older grammar has only one order.
    return Truth(normalized(codec, desc), geometry, is_desc_first=grammar.is_numbered or next(iter(item)) == "desc")


def _box(box: Any, where: str) -> Geometry:
    if not isinstance(box, list | tuple) or not is_box(box):
        raise TaskError(f"{where}.bbox_2d is {box!r:.80}; give 4 integers 0-999 with x2 >= x1 and y2 >= y1")
    return Geometry("bbox_2d", tuple(box))


def _polygon(poly: Any, where: str) -> Geometry:
    points: Sequence[Any] = poly if isinstance(poly, list | tuple) else ()
    in_pairs = bool(points) and all(isinstance(point, list | tuple) and len(point) == 2 for point in points)
    coords = tuple(value for point in points for value in point) if in_pairs else tuple(points)
    if not is_polygon(coords):
        raise TaskError(
            f"{where}.poly is {poly!r:.80}; give at least 3 points, [x1, y1, x2, y2, ...] or [[x1, y1], ...], of "
            "integers 0-999"
        )
    return Geometry("poly", coords, in_pairs)


def _keys(grammar: Grammar) -> str:
    return " or ".join(f"{{desc, {name}}}" for name in grammar.geometries)


def desc_text(truth: Truth) -> str:
    """The description as written between the quotes."""
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
    """The same as one string."""
    return "".join(text for text, _ in geometry_pieces(geometry, coord_tokens))


def object_pieces(truth: Truth, coord_tokens: bool, name: str = "") -> list[Piece]:
    """`{"desc": "seven", "bbox_2d": [1, 2, 3, 4]}`, after `"object_3": ` if it has that name."""
    structure = Segment.appended_structure
    desc: list[Piece] = [('"desc": "', structure), (desc_text(truth), Segment.appended_desc), ('"', structure)]
    geometry = geometry_pieces(truth.geometry, coord_tokens)
    first, second = (desc, geometry) if truth.is_desc_first else (geometry, desc)
    opening = f'"{name}": {{' if name else "{"
    return [(opening, structure), *first, (", ", structure), *second, ("}", structure)]


def answer_pieces(
    truths: Sequence[Truth], first: int, coord_tokens: bool, *, goes_on: bool, grammar: Grammar = OBJECT_N
) -> list[Piece]:
    """Truths, numbered from `first` if the grammar numbers them, then the end; `goes_on`: objects precede them."""
    pieces: list[Piece] = [] if goes_on else [(grammar.opening, Segment.appended_structure)]
    for rank, truth in enumerate(truths):
        separator: list[Piece] = [(", ", Segment.appended_structure)] if goes_on or rank else []
        name = f"object_{first + rank}" if grammar.is_numbered else ""
        pieces += separator + object_pieces(truth, coord_tokens, name)
    return [*pieces, (grammar.closing, Segment.closing)]
