"""What an image is by its first bytes, and how large it says it is where Pillow would allocate to find out."""

from __future__ import annotations

import re

from pipeline.config.types import ImageFormat

_MAGIC: tuple[tuple[bytes, ImageFormat], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
)

_GIF_BLOCK = re.compile(b"[!,;]")


def sniff(data: bytes) -> ImageFormat | None:
    """The format of the content; None for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), None)


def early_size(name: ImageFormat, data: bytes) -> tuple[int, int] | None:
    """(width, height) of a GIF or WebP, whose canvas Pillow makes on opening; None for others and where unreadable."""
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
    """The screen, widened by the first frame if that is larger."""
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
        elif (block := _GIF_BLOCK.search(data, at)) is not None:  # Pillow skips what is no block, however much
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
