"""Real image files, good and bad, as bytes."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

from PIL import Image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image as a file of this kind."""
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(color: str = "red", width: int = 8, height: int = 6) -> bytes:
    """One colour."""
    return encoded(Image.new("RGB", (width, height), color))


def huge_png(width: int = 60_000, height: int = 60_000) -> bytes:
    """A few bytes whose header, with a valid checksum, claims this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(b"")) + _chunk(b"IEND", b"")


def huge_webp(width: int = 16_000, height: int = 16_000) -> bytes:
    """A WebP whose extended header claims this canvas."""
    body = (
        b"VP8X" + struct.pack("<IB3x", 10, 0) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def wide_gif(width: int = 12_000, height: int = 12_000) -> bytes:
    """A GIF with a screen of 1 x 1 whose first frame claims this size, after a comment."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"
    return screen + b"!\xfe\x03abc\x00" + frame + b";"


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def progressive_jpeg(side: int = 6000, num_bytes: int = 19 << 20) -> bytes:
    """A progressive JPEG of one colour with as many scans as fit into the bytes, each of the whole picture.

    Every scan costs a pass over all coefficients and only few bytes: within `images.max_mb` many minutes.
    """
    data = encoded(Image.new("L", (side, side)), "JPEG", progressive=True, quality=10)
    last = data.rindex(b"\xff\xda")
    head, scan = data[:last], data[last:-2]
    return head + scan * max(1, (num_bytes - len(head)) // len(scan)) + b"\xff\xd9"


def gif_of_zeros(num_bytes: int = 19 << 20) -> bytes:
    """A GIF whose screen is followed by bytes that begin no block, which readers skip one by one."""
    return b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + bytes(num_bytes) + b";"


def png_of_chunks(num_chunks: int = 1_000_000) -> bytes:
    """A PNG with that many empty chunks before its pixels."""
    whole = png()
    at = 8 + 25  # after the signature and IHDR
    return whole[:at] + _chunk(b"teST", b"") * num_chunks + whole[at:]
