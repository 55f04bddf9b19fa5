"""Scenes as the JSONL that the pipeline reads, one line each: `{"id": ..., "messages": [...], "truth": [...]}`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from sluice.demo.digits.patches import patch_text
from sluice.demo.digits.scenes import Scene, SceneObject, Split, scenes
from sluice.demo.tiny.jsonl import write_records


class Record(TypedDict):
    """One line of the data: a stable id, a chat of one user turn, and the objects to find."""

    id: str
    messages: list[dict[str, str]]
    truth: list[SceneObject]


def messages_of(scene: Scene) -> list[dict[str, str]]:
    """The scene as a chat: one user turn of patch tokens."""
    return [{"role": "user", "content": patch_text(scene.pixels)}]


def answer_text(objects: Sequence[Mapping[str, Any]]) -> str:
    """`{"object_1": {"desc": "seven", "bbox_2d": [120, 40, 480, 400]}, ...}`, without the turn terminator."""
    numbered = {
        f"object_{number}": {"desc": item["desc"], "bbox_2d": list(item["bbox_2d"])}
        for number, item in enumerate(objects, start=1)
    }
    return json.dumps(numbered, ensure_ascii=False)


def records(split: Split, count: int, seed: int) -> Iterator[Record]:
    """`count` records; the id encodes (split, seed, index), so it doesn't change with `count`."""
    for index, scene in enumerate(scenes(split, count, seed)):
        yield {
            "id": f"digits-{split}-{seed}-{index:06d}",
            "messages": messages_of(scene),
            "truth": scene.objects,
        }


def write_jsonl(path: Path, split: Split, count: int, seed: int) -> Path:
    """Write `count` records to `path`: a complete file or, if interrupted, none."""
    return write_records(path, records(split, count, seed))
