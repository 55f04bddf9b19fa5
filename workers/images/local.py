"""Images that the caller of the offline engine hands over: a path, encoded bytes or a decoded image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from pipeline.errors import RequestError
from workers.images.decoders import Decoders
from workers.images.paths import read_anywhere
from workers.images.pixels import plain_image


def load_image(source: Any, where: str, decoders: Decoders) -> Image.Image:
    """RGB. The caller's own files are read from anywhere; size, format and decoding have the limits of jobs.

    An open `PIL.Image.Image` is the caller's own object, and is decoded here. Blocks; raises RequestError.
    """
    where, limits = f"{where}: the image", decoders.limits
    if isinstance(source, Image.Image):
        return plain_image(source, limits, where)
    if isinstance(source, str | Path):
        where = f"{where} {source}"
        source = read_anywhere(source, int(limits.max_mb * 2**20), where)
    if not isinstance(source, bytes):
        raise RequestError(f"{where} is a {type(source).__name__}; give a path, bytes or a PIL image")
    return decoders.decode(source, where)
