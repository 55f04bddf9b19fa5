"""From untrusted bytes to an RGB image; runs in a process of its own (decode_process.py), as it may take any time.

- The format is that of the content. Pillow's reader for it is opened directly: `Image.open` would try others, and
  would warn or fail by a global limit that is not ours.
- The size is checked before a pixel is decoded, and before anything of that size is allocated.
- The result owns its pixels and nothing else: first frame, turned upright (EXIF), on white, without metadata.
"""

from __future__ import annotations

from io import BytesIO

from PIL import Image, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from pipeline.config.types import ImageFormat, ImagesConfig
from pipeline.errors import RequestError
from workers.images.headers import early_size, sniff
from workers.images.paths import too_large

_READERS: dict[ImageFormat, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}


def open_image(data: bytes, limits: ImagesConfig, where: str) -> Image.Image:
    """Decode one image; mode RGB. Blocks; raises MemoryError, and RequestError, which begins with `where`."""
    name = check_encoded(data, limits, where)
    try:
        if (size := early_size(name, data)) is not None:
            _check_size(size, limits.max_pixels, where)
        with _READERS[name](BytesIO(data)) as image:
            _check_size(image.size, limits.max_pixels, where)
            image.load()
            return _plain(image)
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise anything over bytes that somebody made up
        reason = f"{type(error).__name__}: {error}"[:200]
        raise RequestError(f"{where}: is damaged or no {name} ({reason}); replace it") from error


def check_encoded(data: bytes, limits: ImagesConfig, where: str) -> ImageFormat:
    """The format by the first bytes. Raises RequestError for one that is not accepted, or too many bytes."""
    if len(data) > (max_bytes := int(limits.max_mb * 2**20)):
        raise too_large(len(data), max_bytes, where)
    name = sniff(data)
    if name is None or name not in limits.formats:
        what = name or f"content that begins with {data[:12]!r}"
        raise RequestError(f"{where}: is {what}, accepted are {', '.join(limits.formats)}; convert it")
    return name


def plain_image(image: Image.Image, limits: ImagesConfig, where: str) -> Image.Image:
    """The same for an image that is open already, which stays as it is."""
    _check_size(image.size, limits.max_pixels, where)
    try:
        image.load()
        return _plain(image.copy())
    except Exception as error:  # as above
        raise RequestError(f"{where}: is damaged ({type(error).__name__}: {error}); replace it") from error


def _check_size(size: tuple[int, int], max_pixels: int, where: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(f"{where}: says it is {width} x {height} pixels, which is empty; replace it")
    if width * height > max_pixels:
        raise RequestError(
            f"{where}: is {width} x {height} pixels, images.max_pixels allows {max_pixels}; resize it or raise that"
        )


def _plain(image: Image.Image) -> Image.Image:
    """Upright RGB on white, with no tie to the file."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("I", "I;16"):  # 16 bits of grey; a conversion would cut them at 255
        plain = image.point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
    elif image.has_transparency_data:
        over = image.convert("RGBA")
        plain = Image.new("RGB", over.size, "white")
        plain.paste(over, mask=over.getchannel("A"))
    else:
        plain = image.convert("RGB")
    plain.info = {}
    return plain
