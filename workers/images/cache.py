"""Decoded images, least recently used ones out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from PIL import Image

BYTES_PER_PIXEL = 4  # Pillow keeps RGB in 32 bits


class ImageCache:
    """Bounded by the bytes of the pixels; an image larger than the whole is not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[Hashable, Image.Image] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._images)

    def get(self, key: Hashable) -> Image.Image | None:
        """The image, now the most recently used."""
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
        return image

    def put(self, key: Hashable, image: Image.Image) -> None:
        """Keep the image, and drop others until the bound holds."""
        self._drop(key)
        if _cost(image) > self._max_bytes:
            return
        self._images[key] = image
        self.num_bytes += _cost(image)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._images)))

    def clear(self) -> None:
        """Drop everything."""
        self._images.clear()
        self.num_bytes = 0

    def _drop(self, key: Hashable) -> None:
        image = self._images.pop(key, None)
        if image is not None:
            self.num_bytes -= _cost(image)


def _cost(image: Image.Image) -> int:
    return image.width * image.height * BYTES_PER_PIXEL
