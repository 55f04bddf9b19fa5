"""The section `images`: which images a worker may fetch, from where, and how large they may be."""

from __future__ import annotations

from typing import Literal

from pipeline.config.section import Section

ImageFormat = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP"]


class ImagesConfig(Section, frozen=True, kw_only=True):
    """Nothing is open by default: paths need `roots`, URLs need `hosts`."""

    roots: tuple[str, ...] = ()  # directories from which image files may be read
    hosts: tuple[str, ...] = ()  # "host" (the scheme's own port), "host:port" or "[IPv6]:port"; no wildcards
    max_mb: float = 20  # of one encoded image
    max_pixels: int = 40_000_000  # width x height, checked before anything is decoded
    formats: tuple[ImageFormat, ...] = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # by content, not by name
    fetch_timeout_s: float = 20  # of one URL, retries included
    cache_mb: int = 256  # decoded images kept by a worker; 0 = none
    decode_timeout_s: float = 10  # of one image; the process that decodes it is killed then
    decode_mb: int = 2048  # address space of a process that decodes; an image that needs more is refused
    decode_processes: int = 2  # that decode at a time; started with the first image
