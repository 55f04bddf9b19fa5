"""The truth of a detection prompt: a list of {desc, bbox_2d}; with the grammar `objects` also of {desc, poly}."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from consumers.detection.geometry import Box, Geometry, is_box, is_polygon
from consumers.detection.grammar import OBJECT_N, Grammar
from consumers.task import TextCodec
from pipeline.errors import TaskError


@dataclass(frozen=True)
class Truth:
    """One true object."""

    desc: str
    geometry: Geometry
    is_desc_first: bool = True  # as it is written

    @property
    def box(self) -> Box:
        """What is matched."""
        return self.geometry.box


def read_truths(truth: Any, where: str, codec: TextCodec, grammar: Grammar = OBJECT_N) -> list[Truth]:
    """The truths in their order; raises TaskError that says what is wrong in which item and what to do."""
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
        raise TaskError(f"{where}.desc is no valid Unicode ({error}); remove the lone surrogate") from error
    if terminators:
        raise TaskError(f"{where}.desc {desc!r:.80} spells a turn terminator; remove it")
    geometry = _polygon(item[kind], where) if kind == "poly" else _box(item[kind], where)
    # The order of the row is the order in which it is written; the older grammar has one order alone.
    return Truth(desc, geometry, is_desc_first=grammar.is_numbered or next(iter(item)) == "desc")


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
