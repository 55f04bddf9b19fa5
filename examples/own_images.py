"""Detection on your own images: rows from a folder of pictures, each with its boxes in a JSON file of the same name.

    pictures/kitchen.jpg
    pictures/kitchen.json      [{"label": "cup", "box": [412, 88, 517, 240]}, …]     x1, y1, x2, y2 in pixels

    python examples/own_images.py pictures scenes.jsonl
    sluice task try -c configs/pictures.yaml --model ./my-vision-model --data scenes.jsonl --rows 2
    sluice run -c configs/pictures.yaml --model ./my-vision-model --data scenes.jsonl

A row names its picture by its path below `images.roots`, which is [pictures] in that configuration. Boxes become
integers from 0 to 999 of the picture's width and height.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
QUESTION = "List every object as JSON, with its name and its box."


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """One per picture that has a JSON file, in the order of their names."""
    for path in sorted(folder.iterdir()):
        boxes = path.with_suffix(".json")
        if path.suffix.lower() not in ENDINGS or not boxes.exists():
            continue
        with Image.open(path) as picture:
            width, height = ImageOps.exif_transpose(picture).size  # upright, as the model sees it
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        yield {
            "id": path.name,
            "messages": [{"role": "user", "content": content}],
            "images": [path.name],
            "truth": [truth(one, width, height) for one in json.loads(boxes.read_text(encoding="utf-8"))],
        }


def truth(one: dict[str, Any], width: int, height: int) -> dict[str, Any]:
    """An object as the detection task wants it."""
    x1, y1, x2, y2 = one["box"]
    sizes = (width, height, width, height)
    scaled = [min(999, max(0, round(value * 999 / size))) for value, size in zip((x1, y1, x2, y2), sizes, strict=True)]
    return {"desc": one["label"], "bbox_2d": scaled}


def main(folder: str, out: str) -> None:
    made = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows(Path(folder))]
    if not made:
        sys.exit(f"error: no picture in {folder} has a JSON file of the same name; nothing was written")
    Path(out).write_text("".join(made), encoding="utf-8")
    print(f"{len(made)} rows in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
