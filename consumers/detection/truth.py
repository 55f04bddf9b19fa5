"""The truth of a detection prompt: a list of {desc, bbox_2d}."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from consumers.detection.geometry import Box, is_box
from consumers.task import TextCodec
from pipeline.errors import TaskError


@dataclass(frozen=True)
class Truth:
    """One true object."""

    desc: str
    box: Box


def read_truths(truth: Any, where: str, codec: TextCodec) -> list[Truth]:
    """The truths in their order; raises TaskError that says what is wrong in which item and what to do."""
    if not isinstance(truth, list | tuple):
        raise TaskError(f"{where}: truth is {type(truth).__name__}; give a list of {{desc, bbox_2d}}")
    return [_read(item, f"{where}: truth[{index}]", codec) for index, item in enumerate(truth)]


def _read(item: Any, where: str, codec: TextCodec) -> Truth:
    if not isinstance(item, dict) or set(item) != {"desc", "bbox_2d"}:
        found = sorted(map(str, item)) if isinstance(item, dict) else type(item).__name__
        raise TaskError(f"{where} has {found}; give exactly the keys desc and bbox_2d")
    desc, box = item["desc"], item["bbox_2d"]
    if not isinstance(desc, str) or not desc.strip():
        raise TaskError(f"{where}.desc is {desc!r:.80}; give a non-empty string")
    try:
        terminators = set(codec.encode(desc)) & set(codec.eos_token_ids)
    except (UnicodeEncodeError, TypeError) as error:
        raise TaskError(f"{where}.desc is no valid Unicode ({error}); remove the lone surrogate") from error
    if terminators:
        raise TaskError(f"{where}.desc {desc!r:.80} spells a turn terminator; remove it")
    if not isinstance(box, list | tuple) or not is_box(box):
        raise TaskError(f"{where}.bbox_2d is {box!r:.80}; give 4 integers 0-999 with x2 >= x1 and y2 >= y1")
    x1, y1, x2, y2 = box
    return Truth(desc, (x1, y1, x2, y2))
