"""The picture of a sequence: a file that people look at, found and read. Blocking.

- Which picture: the first of the result's images that is a path or a digest, else `metadata["picture"]`, a path.
- Only files below the data file's directory or `images.roots` are read, whatever links and dots a name has: the
  resolved path is opened name by name, and no link is followed.
- Only images of the formats of `images.formats`, told by their content, within `images.max_mb` and `max_pixels`.
"""

from __future__ import annotations

import io
import os
import re
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from pipeline.config.types import Config, ImagesConfig
from pipeline.errors import RequestError
from pipeline.wire.messages import SequenceResult

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MEDIA = {
    "JPEG": "image/jpeg", "MPO": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif",
    "BMP": "image/bmp",
}  # fmt: skip
_UNKNOWN = "application/octet-stream"  # of a format that browsers do not show
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # of EXIF


@dataclass(frozen=True)
class Picture:
    """The encoded file; `size` is (width, height) in pixels, upright."""

    data: bytes
    media_type: str
    size: tuple[int, int]


def names_of(result: SequenceResult) -> list[str]:
    """Paths that may hold its picture; empty when it has none on disk."""
    for image in result.images:
        if image.path:
            return [image.path]
        if image.sha256 and _DIGEST.fullmatch(image.sha256.lower()):
            return [image.sha256.lower(), f"sha256/{image.sha256.lower()}"]
    named = result.metadata.get("picture")
    return [named] if isinstance(named, str) and named else []


def read_picture(config: Config, result: SequenceResult) -> Picture | None:
    """None for a sequence without a picture. Raises RequestError that says why its picture cannot be shown."""
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
    """Raises RequestError for what is no image of an accepted format and size; no pixel is decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is our own, below
            image = Image.open(io.BytesIO(data), formats=limits.formats)
        with image:
            width, height = image.size
            is_within = width * height <= limits.max_pixels
            on_its_side = is_within and _is_on_its_side(image)
    except Exception as error:  # Pillow's readers raise anything over bytes that somebody made up
        raise RequestError(f"the picture is no image of a format in images.formats ({type(error).__name__})") from error
    if not is_within:
        raise RequestError(f"the picture has {width}x{height} pixels; images.max_pixels allows {limits.max_pixels}")
    size = (height, width) if on_its_side else (width, height)
    return Picture(data, _MEDIA.get(image.format or "", _UNKNOWN), size)


def _is_on_its_side(image: Image.Image) -> bool:
    """Only where EXIF stands before the pixels: Pillow decodes a whole PNG to look for it at the end."""
    return "exif" in image.info and image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE


def _read(root: str, inside: str, max_bytes: int) -> bytes | None:
    """None where there is no such file."""
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
