"""Pictures that arrive as bytes, written once below `images.store` and referenced by their digest.

    bytes ─ format, size ─▶ <images.store>/sha256/<digest> ─▶ ImageRef(sha256=…) ─▶ the queue, which carries no bytes

- Every role of a run reads that directory beside `images.roots`, so a worker finds what a producer or gateway wrote.
- A file is complete or absent, and only its owner can read it. Nothing is decoded here.
- Several processes may write. Each counts what is there twice a minute at most, so together they may exceed
  `images.store_mb` by what they write in that time. Nothing is removed: jobs and samples refer to it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import msgspec

from sluice.pipeline.config.types import Config, ImagesConfig
from sluice.pipeline.errors import DataError
from sluice.pipeline.files import fsync_directory, is_unfinished, remove_stale, write_atomic
from sluice.pipeline.images.pixels import check_encoded
from sluice.pipeline.images.store import check_digest, normal_digest
from sluice.pipeline.prompts.rows import RowImage

_COUNT_AFTER_S = 30.0


class StoreError(DataError):
    """The directory of `images.store` takes no more, or can't be written."""


def images_directory(config: Config) -> Path:
    """Where this run's pictures are written."""
    return Path(config.images.store) if config.images.store else Path(config.run_dir) / config.run / "images"


def images_of_run(config: Config) -> ImagesConfig:
    """The `images` section with that directory as its store and among its roots; for every role that reads pictures."""
    store = str(images_directory(config))
    return msgspec.structs.replace(config.images, roots=(*config.images.roots, store), store=store)


def admit_bytes(images: Iterable[str | RowImage], limits: ImagesConfig) -> None:
    """Raise RequestError for bytes of a row that are no accepted picture."""
    for at, image in enumerate(images):
        if isinstance(image, RowImage) and image.data is not None:
            where = f"`images[{at}]`"
            check_encoded(image.data, limits, where)
            if image.sha256:
                check_digest(image.data, normal_digest(image.sha256, where), where)


class ImageWriter:
    """Writes below `directory`; may be used from several threads."""

    def __init__(self, directory: Path, limits: ImagesConfig) -> None:
        self._folder, self._limits = directory / "sha256", limits
        self._max_bytes = limits.store_mb << 20
        self._lock = threading.Lock()
        self._num_bytes, self._counted_at = 0, -_COUNT_AFTER_S

    @classmethod
    def of(cls, config: Config) -> ImageWriter:
        """That of a run."""
        return cls(images_directory(config), config.images)

    def has(self, digest: str) -> bool:
        """Whether a picture with this digest (64 hexadecimal digits) was written. Blocks."""
        return (self._folder / digest).is_file()

    def digest(self, data: bytes, where: str) -> str:
        """What `put` would answer; nothing is written. Raises RequestError, which begins with `where`."""
        check_encoded(data, self._limits, where)
        return sha256(data).hexdigest()

    def put(self, data: bytes, where: str) -> str:
        """Its digest; on return it is on disk. Blocks.

        Raises RequestError, which begins with `where`, if it isn't an accepted picture; StoreError.
        """
        digest = self.digest(data, where)
        path = self._folder / digest
        with self._lock:
            try:
                if _has_size(path, len(data)):
                    return digest
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._check_room(len(data))
                write_atomic(path, data, mode=0o600, sweep=False)
                fsync_directory(self._folder)
            except OSError as error:
                raise StoreError(f"{self._folder}: a picture can't be written ({error}); check images.store") from error
            self._num_bytes += len(data)
        return digest

    def _check_room(self, num_bytes: int) -> None:
        """Raises StoreError."""
        if time.monotonic() - self._counted_at >= _COUNT_AFTER_S:
            self._num_bytes = self._count()
            self._counted_at = time.monotonic()
        if self._num_bytes + num_bytes > self._max_bytes:
            raise StoreError(
                f"{self._folder} has {self._num_bytes} bytes of pictures, and {num_bytes} more exceed images.store_mb "
                f"({self._limits.store_mb}); raise it, or set images.store to another directory"
            )

    def _count(self) -> int:
        """Bytes of the pictures that are there; what killed writers left is removed."""
        num_bytes = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if is_unfinished(entry.name):
                    remove_stale(Path(entry.path))
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    num_bytes += entry.stat(follow_symlinks=False).st_size
        return num_bytes


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return path.is_file() and path.stat().st_size == num_bytes
    except FileNotFoundError:
        return False
