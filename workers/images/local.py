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
    where = f"{where}: the image"
    if isinstance(source, Image.Image):
        return plain_image(source, limits or ImagesConfig(), where)
    if isinstance(source, str | Path):
        where = f"{where} {source}"
        try:
            source = Path(source).read_bytes()
        except OSError as error:
            raise RequestError(f"{where} cannot be read ({error.strerror or error})") from error
    if not isinstance(source, bytes):
        raise RequestError(f"{where} is a {type(source).__name__}; give a path, bytes or a PIL image")
    return open_image(source, limits or ImagesConfig(), where)
