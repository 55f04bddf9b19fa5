"""From untrusted bytes to an RGB image; runs in a separate process (decode_process.py) because it may take any time.

- The content decides the format. Pillow's reader for it is opened directly: `Image.open` would try others, and would
  warn or fail at a global limit that isn't ours.
- The size is checked before a pixel is decoded, and before anything of that size is allocated.
- The result owns its pixels and nothing else: first frame, upright (EXIF), on white, without metadata.
- GIF and WebP sizes are read from the headers here, because Pillow would allocate to find out.
"""

from __future__ import annotations

import re
from io import BytesIO

from PIL import Image, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from sluice.pipeline.config.types import ImageFormat, ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.paths import too_large

_READERS: dict[ImageFormat, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}
_MAGIC: tuple[tuple[bytes, ImageFormat], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
)
_GIF_BLOCK = re.compile(b"[!,;]")


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
    except Exception as error:  # Pillow's readers raise anything on malicious bytes
        reason = f"{type(error).__name__}: {error}"[:200]
        raise RequestError(f"{where}: is damaged or not a {name} ({reason}); replace it") from error


def check_encoded(data: bytes, limits: ImagesConfig, where: str) -> ImageFormat:
    """The format from the first bytes. Raises RequestError if it isn't accepted, or for too many bytes."""
    if len(data) > (max_bytes := int(limits.max_mb * 2**20)):
        raise too_large(len(data), max_bytes, where)
    name = sniff(data)
    if name is None or name not in limits.formats:
        what = name or f"data that starts with {data[:12]!r}"
        raise RequestError(f"{where}: is {what}, accepted are {', '.join(limits.formats)}; convert it")
    return name


def plain_image(image: Image.Image, limits: ImagesConfig, where: str) -> Image.Image:
    """The same for an image that is already open, which is left unchanged."""
    _check_size(image.size, limits.max_pixels, where)
    try:
        image.load()
        return _plain(image.copy())
    except Exception as error:  # as above
        raise RequestError(f"{where}: is damaged ({type(error).__name__}: {error}); replace it") from error


def _check_size(size: tuple[int, int], max_pixels: int, where: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(f"{where}: claims {width} x {height} pixels, which is empty; replace it")
    if width * height > max_pixels:
        raise RequestError(
            f"{where}: is {width} x {height} pixels, images.max_pixels allows {max_pixels}; resize it or raise the "
            "limit"
        )


def _plain(image: Image.Image) -> Image.Image:
    """Upright RGB on white, with no reference to the file."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("I", "I;16"):  # 16-bit grey; a conversion would clip it at 255
        plain = image.point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
    elif image.has_transparency_data:
        over = image.convert("RGBA")
        plain = Image.new("RGB", over.size, "white")
        plain.paste(over, mask=over.getchannel("A"))
    else:
        plain = image.convert("RGB")
    plain.info = {}
    return plain


def sniff(data: bytes) -> ImageFormat | None:
    """The format of the content; None for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), None)


def early_size(name: ImageFormat, data: bytes) -> tuple[int, int] | None:
    """(width, height) of a GIF or WebP, where Pillow allocates the canvas on opening; None if other or unreadable."""
    if name == "GIF":
        return _gif(data)
    return _webp(data) if name == "WEBP" else None


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return _little(data[24:27]) + 1, _little(data[27:30]) + 1
    if kind == b"VP8L":
        bits = _little(data[21:25])
        return (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1
    return (_little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF) if kind == b"VP8 " else None


def _gif(data: bytes) -> tuple[int, int] | None:
    """The screen size, widened by the first frame if that is larger."""
    if len(data) < 13:
        return None
    width, height = _little(data[6:8]), _little(data[8:10])
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while at < len(data) and data[at] != 0x3B:
        if data[at] == 0x2C:
            frame = data[at + 1 : at + 9]
            right, bottom = _little(frame[0:2]) + _little(frame[4:6]), _little(frame[2:4]) + _little(frame[6:8])
            return max(width, right), max(height, bottom)
        if data[at] == 0x21:
            at = _after_extension(data, at)
        elif (block := _GIF_BLOCK.search(data, at)) is not None:  # Pillow skips any length of non-blocks
            at = block.start()
        else:
            break
    return width, height


def _after_extension(data: bytes, at: int) -> int:
    at += 2
    while at < len(data) and data[at]:
        at += data[at] + 1
    return at + 1


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")
