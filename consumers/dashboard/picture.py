"""The pictures of a sequence: their files, located and read (blocking), and the boxes drawn over the first.

- Which pictures: those of the result's images that are on disk, by path or digest, else `metadata["picture"]`, a path.
- Only files below the data file's directory or `images.roots` are read, by the image store's own rules.
- A picture whose digest is known is shown only as long as its bytes have it.
- Only images in the formats of `images.formats`, detected by content, within `images.max_mb` and `max_pixels`.
- Boxes are xyxy 0-999 of the picture's width and height; the drawing is WIDTH wide and keeps the aspect ratio.
- A truth is dashed, a prediction solid; the label states its fate as well as the colour. Labels stay inside the
  drawing: a prediction's is above its box or, if there is no room, inside it; a truth's is below.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from sluice.consumers.dashboard.outcome import Pair
from sluice.consumers.dashboard.render import visible
from sluice.consumers.tasks.detection.geometry import MAX_COORD, Box
from sluice.pipeline.config.types import Config, ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.paths import Roots
from sluice.pipeline.images.store import check_digest, images_of_run
from sluice.pipeline.wire.messages import SequenceResult

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MEDIA = {
    "JPEG": "image/jpeg", "MPO": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif",
    "BMP": "image/bmp",
}  # fmt: skip
_UNKNOWN = "application/octet-stream"  # a format that browsers don't show
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # EXIF tags
WIDTH = 720.0
_MIN_SIDE = 120.0
_MAX_SIDE = 1440.0
_LINE = 18.0  # label height
_CHAR = 10.3  # approximate character width
_MAX_SHAPES = 400
_MOST_LINES = 5  # by which a label is shifted
_CLASS = {"matched": "matched", "false positive": "false-positive", "missed": "missed"}
_SIGN = {"matched": "\u2713", "false positive": "\u2717", "missed": "?"}


@dataclass(frozen=True)
class Source:
    """A picture on disk: the first of `names` that exists below a root, and the digest of its bytes if it is known."""

    names: tuple[str, ...]
    digest: str | None = None


@dataclass(frozen=True)
class Picture:
    """The encoded file; `size` is (width, height) in pixels, upright."""

    data: bytes
    media_type: str
    size: tuple[int, int]


def sources_of(result: SequenceResult) -> list[Source]:
    """Its pictures, in the order of its images; empty if none is on disk."""
    found: list[Source] = []
    for image in result.images:
        digest = (image.sha256 or "").lower()
        digest = digest if _DIGEST.fullmatch(digest) else None
        if image.path:
            found.append(Source((image.path,), digest))
        elif digest:
            found.append(Source((digest, f"sha256/{digest}"), digest))
    named = result.metadata.get("picture")
    return found or ([Source((named,))] if isinstance(named, str) and named else [])


def read_picture(config: Config, result: SequenceResult, number: int = 0) -> Picture | None:
    """None for a sequence with fewer pictures. Raises RequestError that says why this picture can't be shown."""
    sources = sources_of(result)
    if number >= len(sources):
        return None
    roots = [str(Path(config.data.path).parent)] if config.data.path else []
    images = images_of_run(config)
    data = read_below([*roots, *images.roots], sources[number], images.max_mb, images.store)
    return check_picture(data, images)


def read_below(roots: Sequence[str], source: Source, max_mb: float, store: str = "") -> bytes:
    """The bytes of a picture below one of these directories; `store` may be absent. Raises RequestError."""
    if not roots:
        raise RequestError("no such picture: neither data.path nor images.roots says where pictures are")
    allowed = Roots(roots, may_lack=store)
    data = allowed.read(allowed.find("the picture", *source.names), int(max_mb * 2**20), "the picture")
    check_digest(data, source.digest, "the picture")
    return data


def check_picture(data: bytes, limits: ImagesConfig) -> Picture:
    """Raises RequestError unless it is an image of an accepted format and size; decodes no pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # we apply our own limit below
            image = Image.open(io.BytesIO(data), formats=limits.formats)
        with image:
            width, height = image.size
            is_within = width * height <= limits.max_pixels
            on_its_side = is_within and _is_on_its_side(image)
    except Exception as error:  # Pillow's readers may raise anything on crafted bytes
        raise RequestError(f"the picture is not in a format of images.formats ({type(error).__name__})") from error
    if not is_within:
        raise RequestError(f"the picture has {width}x{height} pixels; images.max_pixels allows {limits.max_pixels}")
    size = (height, width) if on_its_side else (width, height)
    return Picture(data, _MEDIA.get(image.format or "", _UNKNOWN), size)


def _is_on_its_side(image: Image.Image) -> bool:
    """Only if EXIF precedes the pixels: otherwise Pillow decodes a whole PNG to look for it at the end."""
    return "exif" in image.info and image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE


@dataclass(frozen=True)
class Shape:
    """A rectangle and its label, in drawing units."""

    css: str
    x: float
    y: float
    width: float
    height: float
    label: str
    label_x: float
    label_y: float
    title: str


@dataclass(frozen=True)
class Drawing:
    """What to draw; `hidden` shapes were left out because there are too many."""

    width: float
    height: float
    shapes: list[Shape]
    hidden: int = 0


def drawing(pairs: Iterable[Pair], size: tuple[int, int] | None = None) -> Drawing:
    """`size`: width and height of the picture in pixels; None draws a square field."""
    height = WIDTH if size is None else min(_MAX_SIDE, max(_MIN_SIDE, WIDTH * size[1] / max(1, size[0])))
    shapes = [shape for pair in pairs for shape in _shapes(pair, height)]
    return Drawing(WIDTH, round(height, 1), _apart(shapes[:_MAX_SHAPES], height), max(0, len(shapes) - _MAX_SHAPES))


def _apart(shapes: list[Shape], height: float) -> list[Shape]:
    """Overlapping labels move down a line, a few times at most."""
    placed: list[Shape] = []
    for shape in shapes:
        for _ in range(_MOST_LINES):
            lower = shape.label_y + _LINE
            if not any(_overlap(shape, other) for other in placed) or lower > height:
                break
            shape = replace(shape, label_y=round(lower, 1))
        placed.append(shape)
    return placed


def _overlap(one: Shape, other: Shape) -> bool:
    left, right = (one, other) if one.label_x <= other.label_x else (other, one)
    is_beside = left.label_x + _CHAR * len(left.label) < right.label_x
    return bool(one.label and other.label) and abs(one.label_y - other.label_y) < _LINE - 1 and not is_beside


def _shapes(pair: Pair, height: float) -> list[Shape]:
    """For a matched pair the truth comes first, so that the prediction is drawn over it."""
    shapes: list[Shape] = []
    css = _CLASS.get(pair.fate, "")
    if pair.truth_box is not None:
        label = f"{_SIGN['missed']} {pair.truth}" if pair.fate == "missed" else ""
        title = f"truth{' (missed)' if pair.fate == 'missed' else ''}: {pair.truth} {list(pair.truth_box)}"
        shapes.append(_shape(f"truth {css}", pair.truth_box, height, label, title, below=True))
    if pair.box is not None:
        label = f"{pair.number} {_SIGN[pair.fate]} {pair.predicted}"
        iou = "" if pair.iou is None else f", IoU {pair.iou:.2f}"
        title = f"{pair.fate}: {pair.predicted} {list(pair.box)}{iou}"
        shapes.append(_shape(f"prediction {css}", pair.box, height, label, title, below=False))
    return shapes


def _shape(css: str, box: Box, height: float, label: str, title: str, *, below: bool) -> Shape:
    x1, y1, x2, y2 = box
    left, right = x1 * WIDTH / MAX_COORD, x2 * WIDTH / MAX_COORD
    top, bottom = y1 * height / MAX_COORD, y2 * height / MAX_COORD
    label = visible(label, 40)
    at = bottom + _LINE if below else top - 6 if top > _LINE + 6 else top + _LINE
    return Shape(
        css=css,
        x=round(left, 1),
        y=round(top, 1),
        width=round(max(right - left, 1), 1),
        height=round(max(bottom - top, 1), 1),
        label=label,
        label_x=round(max(2.0, min(left + 2, WIDTH - _CHAR * len(label))), 1),
        label_y=round(max(_LINE, min(at, height - 5)), 1),
        title=visible(title, 200),
    )
