"""COCO-style detection sets as prompts and truths of the detection task.

    {images, annotations, categories} ─▶ one row per picture: images, messages, truth [{desc, bbox_2d}]

- A COCO box is [x, y, width, height] in pixels from the top left corner. A truth's is xyxy in integers from 0 to 999:
  round(999 * x / picture width) and round(999 * y / picture height). So 999 is the right or lower edge.
- Sizes are those of the upright picture. The file's header must agree with the set; otherwise coordinates would point
  elsewhere.
- Everything left out is counted under its rule (`RULES`). A picture without remaining boxes gets no row: an empty truth
  would say that nothing is there. `keep_empty` keeps pictures that have no annotations at all.
- Truths keep the order of the annotations, rows the order of the images.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from sluice.pipeline.errors import DataError, RequestError
from sluice.pipeline.files import write_atomic
from sluice.pipeline.images.paths import Roots

RULES = {
    "crowd": "a region of many objects (iscrowd), not the box of one",
    "degenerate": "a box without width or height, or thinner than one step of the 0-999 grid inside the picture",
    "outside": "a box outside the picture",
    "clipped": "a box that extends beyond the picture; the part inside is kept",
    "unknown": "an annotation with an unlisted image or category",
    "no_file": "a picture that isn't below the directory, or isn't an image",
    "other_size": "a picture file with a different size than in the set",
    "no_box": "a picture with no boxes left",
}
"""Why a box or picture is left out; for `clipped`, what was changed."""

PROMPT = (
    "Find every object of these kinds in the picture: {categories}. Answer with JSON, "
    '{"object_1": {"desc": kind, "bbox_2d": [x1, y1, x2, y2]}, ...}; coordinates are integers from 0 to 999 of the '
    "picture's width and height."
)
MAX_COORD = 999
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_ORIENTATION = 0x0112
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


class _Image(msgspec.Struct, frozen=True):
    id: int | str
    file_name: str
    width: int
    height: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1:
            raise ValueError(f"image {self.id!r} is {self.width} x {self.height} pixels")


class _Annotation(msgspec.Struct, frozen=True):
    image_id: int | str
    category_id: int | str
    bbox: tuple[float, float, float, float]
    iscrowd: int | bool = 0


class _Category(msgspec.Struct, frozen=True):
    id: int | str
    name: str

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(f"category {self.id!r} has no name")


class CocoSet(msgspec.Struct, frozen=True):
    """The parts of an annotation file that are read."""

    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


@dataclass
class Converted:
    """What a conversion wrote, and what it left out."""

    rows: int = 0
    boxes: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])  # by rule
    first: dict[str, str] = field(default_factory=dict[str, str])  # rule → its first case

    def leave(self, rule: str, what: str) -> None:
        """Count one."""
        self.left_out[rule] += 1
        self.first.setdefault(rule, what)


def read_coco(path: Path) -> CocoSet:
    """Raises DataError that names the place."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=CocoSet)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: not a COCO detection set ({error}); it needs images, annotations and categories"
        ) from error
    for name, ids in (
        ("images", [one.id for one in found.images]),
        ("categories", [one.id for one in found.categories]),
    ):
        if twice := [one for one, count in Counter(ids).items() if count > 1]:
            raise DataError(f"{path}: {name} has the id {twice[0]!r} twice; each needs its own")
    return found


def convert(annotations: Path, images: Path, out: Path, *, prompt: str = PROMPT, keep_empty: bool = False) -> Converted:
    """Write the rows as JSONL. Raises DataError, even if there are none."""
    if not images.is_dir():
        raise DataError(f"{images}: no such directory; set --images to the one the set's file names are relative to")
    said = Converted()
    lines = [msgspec.json.encode(row) for row in rows_of(read_coco(annotations), images, said, prompt, keep_empty)]
    if not lines:
        why = "; ".join(f"{rule}: {said.first[rule]}" for rule in said.left_out)
        raise DataError(f"{annotations}: no rows ({why or 'the set has no images'})")
    try:
        write_atomic(out, b"\n".join([*lines, b""]))
    except OSError as error:
        raise DataError(f"{out}: can't be written ({error})") from error
    return said


def rows_of(
    found: CocoSet, images: Path, said: Converted, prompt: str = PROMPT, keep_empty: bool = False
) -> Iterator[dict[str, Any]]:
    """The rows in the order of the images; omissions are counted in `said`."""
    names = {one.id: one.name for one in found.categories}
    listed = {one.id for one in found.images}
    of_image: defaultdict[int | str, list[_Annotation]] = defaultdict(list)
    annotated = {one.image_id for one in found.annotations}  # also by those that are left out below
    for at, one in enumerate(found.annotations):
        if one.image_id in listed and one.category_id in names:
            of_image[one.image_id].append(one)
        else:
            said.leave("unknown", f"annotations[{at}]")
    text = prompt.replace("{categories}", ", ".join(names.values()))
    content = [{"type": "image"}, {"type": "text", "text": text}]
    roots = Roots((str(images),))
    for image in found.images:
        truth = [
            {"desc": names[one.category_id], "bbox_2d": box}
            for one in of_image[image.id]
            if (box := _box(one, image, said)) is not None
        ]
        if not truth and (image.id in annotated or not keep_empty):
            said.leave("no_box", image.file_name)
        elif _is_there(image, images, roots, said):
            said.rows += 1
            said.boxes += len(truth)
            yield {
                "id": image.id,
                "images": [image.file_name],
                "messages": [{"role": "user", "content": content}],
                "truth": truth,
                "metadata": {"width": image.width, "height": image.height},
            }


def _box(one: _Annotation, image: _Image, said: Converted) -> list[int] | None:
    """xyxy, 0-999, or None if a rule leaves it out."""
    x, y, width, height = one.bbox
    where = f"{image.file_name} {list(one.bbox)}"
    if one.iscrowd:
        return said.leave("crowd", where)
    if not all(map(math.isfinite, one.bbox)) or width <= 0 or height <= 0:
        return said.leave("degenerate", where)
    if x >= image.width or y >= image.height or x + width <= 0 or y + height <= 0:
        return said.leave("outside", where)
    edges = (x, y, x + width, y + height)
    sides = (image.width, image.height) * 2
    inside = [min(max(edge, 0.0), side) for edge, side in zip(edges, sides, strict=True)]
    box = [round(MAX_COORD * edge / side) for edge, side in zip(inside, sides, strict=True)]
    if box[2] <= box[0] or box[3] <= box[1]:
        return said.leave("degenerate", where)
    if any(abs(edge - kept) > 0.5 for edge, kept in zip(edges, inside, strict=True)):  # half a pixel is rounding
        said.leave("clipped", where)
    return box


def _is_there(image: _Image, images: Path, roots: Roots, said: Converted) -> bool:
    """Whether the file is a picture of that size; only its header is read."""
    try:
        found = roots.find(image.file_name, image.file_name)
        size = _upright_size(os.path.join(found.root, found.inside))
    except (RequestError, OSError) as error:
        said.leave("no_file", str(error))
        return False
    except Exception as error:  # Pillow's readers may raise anything on crafted bytes
        said.leave("no_file", f"{images / image.file_name} is damaged ({type(error).__name__}: {error})")
        return False
    if size != (image.width, image.height):
        expected = f"{image.width} x {image.height}"
        said.leave("other_size", f"{images / image.file_name} is {size[0]} x {size[1]}, not {expected}")
        return False
    return True


def _upright_size(path: str) -> tuple[int, int]:
    with Image.open(path, formats=_FORMATS) as picture:
        width, height = picture.size
        exif = Image.Image.getexif(picture)  # a PNG's own method decodes all pixels to read what follows them
        return (height, width) if exif.get(_ORIENTATION) in _SIDEWAYS else (width, height)


def summary(said: Converted, out: Path, images: Path) -> Sequence[str]:
    """Lines for the terminal."""
    lines = [f"{out}: {said.rows} rows, {said.boxes} boxes (xyxy, integers 0-999 of width and height)"]
    lines += [f"  {rule}: {count}, {RULES[rule]}; first: {said.first[rule]}" for rule, count in said.left_out.items()]
    return [*lines, f"train with images.roots: [{images}]"]
