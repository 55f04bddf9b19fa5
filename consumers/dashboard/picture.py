"""The picture of a sequence: its file, located and read (blocking), and the boxes drawn over it.

- Which picture: the first of the result's images that is a path or a digest, else `metadata["picture"]`, a path.
- Only files below the data file's directory or `images.roots` are read, whatever links and dots a name contains: the
  resolved path is opened component by component, and no link is followed.
- Only images in the formats of `images.formats`, detected by content, within `images.max_mb` and `max_pixels`.
- Boxes are xyxy 0-999 of the picture's width and height; the drawing is WIDTH wide and keeps the aspect ratio.
- A truth is dashed, a prediction solid; the label states its fate as well as the colour. Labels stay inside the
  drawing: a prediction's is above its box or, if there is no room, inside it; a truth's is below.
"""

from __future__ import annotations

import io
import os
import re
import stat
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from sluice.consumers.dashboard.formats import visible
from sluice.consumers.dashboard.outcome import Pair
from sluice.consumers.tasks.detection.geometry import MAX_COORD, Box
from sluice.pipeline.config.types import Config, ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.wire.messages import SequenceResult

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
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
class Picture:
    """The encoded file; `size` is (width, height) in pixels, upright."""

    data: bytes
    media_type: str
    size: tuple[int, int]


def names_of(result: SequenceResult) -> list[str]:
    """Paths that may hold its picture; empty if it has none on disk."""
    for image in result.images:
        if image.path:
            return [image.path]
        if image.sha256 and _DIGEST.fullmatch(image.sha256.lower()):
            return [image.sha256.lower(), f"sha256/{image.sha256.lower()}"]
    named = result.metadata.get("picture")
    return [named] if isinstance(named, str) and named else []


def read_picture(config: Config, result: SequenceResult) -> Picture | None:
    """None for a sequence without a picture. Raises RequestError that says why its picture can't be shown."""
    names = names_of(result)
    if not names:
        return None
    roots = [str(Path(config.data.path).parent)] if config.data.path else []
    return check_picture(read_below([*roots, *config.images.roots], names, config.images.max_mb), config.images)


def read_below(roots: list[str], names: list[str], max_mb: float) -> bytes:
    """The first regular file of these names below a root. Raises RequestError."""
    real_roots = [os.path.realpath(root) for root in roots]
    outside = False
    for root in real_roots:
        for name in names:
            try:
                real = os.path.realpath(os.path.join(root, name))
            except ValueError:
                raise RequestError("the picture's path has NUL characters or broken Unicode; rename it") from None
            home = next((each for each in real_roots if os.path.commonpath((each, real)) == each), None)
            if home is None:
                outside = True
            elif (data := _read(home, os.path.relpath(real, home), int(max_mb * 2**20))) is not None:
                return data
    if outside:
        raise RequestError("the picture lies outside the data file's directory and images.roots; add its directory")
    raise RequestError("no such picture below the data file's directory or images.roots; was it moved?")


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
        raise RequestError(f"the picture is no image of a format in images.formats ({type(error).__name__})") from error
    if not is_within:
        raise RequestError(f"the picture has {width}x{height} pixels; images.max_pixels allows {limits.max_pixels}")
    size = (height, width) if on_its_side else (width, height)
    return Picture(data, _MEDIA.get(image.format or "", _UNKNOWN), size)


def _is_on_its_side(image: Image.Image) -> bool:
    """Only if EXIF precedes the pixels: otherwise Pillow decodes a whole PNG to look for it at the end."""
    return "exif" in image.info and image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE


def _read(root: str, inside: str, max_bytes: int) -> bytes | None:
    """None if there is no such file."""
    *folders, name = inside.split(os.sep)
    try:
        here = os.open(root, _FOLDER)
        try:
            for folder in folders:
                inner = os.open(folder, _FOLDER, dir_fd=here)
                os.close(here)
                here = inner
            file = os.open(name, _FILE, dir_fd=here)
        finally:
            os.close(here)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise RequestError(f"the picture cannot be opened ({getattr(error, 'strerror', error)})") from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise RequestError("the picture is not a regular file; name an image file")
        if status.st_size > max_bytes:
            raise RequestError(f"the picture has {status.st_size} bytes; images.max_mb allows {max_bytes}")
        with os.fdopen(file, "rb", closefd=False) as stream:
            return stream.read(max_bytes)
    finally:
        os.close(file)


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
