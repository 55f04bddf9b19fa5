"""Images that the caller of the offline engine hands over: a path, encoded bytes or a decoded image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from pipeline.config.types import ImagesConfig
from pipeline.errors import RequestError
from workers.images.pixels import open_image, plain_image


def load_image(source: Any, where: str, limits: ImagesConfig | None = None) -> Image.Image:
    """RGB. The caller's own files are read from anywhere; size and format have the limits of jobs.

    Raises RequestError.
    """
    if isinstance(source, Image.Image):
        return plain_image(source, limits or ImagesConfig(), where)
    if isinstance(source, str | Path):
        try:
            source = Path(source).read_bytes()
        except OSError as error:
            raise RequestError(f"{where}: the image {source} cannot be read ({error.strerror or error})") from error
    if not isinstance(source, bytes):
        raise RequestError(f"{where}: an image is a path, bytes or a PIL image, not {type(source).__name__}")
    return open_image(source, limits or ImagesConfig(), where)
