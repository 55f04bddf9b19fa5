"""Images by reference, each fetched once; and those that arrive as bytes, written once and referenced by their digest.

- Concurrent requests for equal references share one fetch. The fetch outlives callers that give up and ends by its
  own time limits. A failed fetch is forgotten, so the next call tries again.
- Cache key: the digest if the reference has one; else the file as it was (path, mtime, size); else the URL.
- Files are read in threads, images decoded in processes; at most `FETCHES` references are processed at once.

    bytes ─ format, size ─▶ <images.store>/sha256/<digest> ─▶ ImageRef(sha256=…) ─▶ the queue, which carries no bytes

- Every role of a run reads that directory beside `images.roots`, so a worker finds what a producer or gateway wrote.
- A file is complete or absent, and only its owner can read it. Nothing is decoded where it is written.
- Several processes may write. Each counts what is there twice a minute at most, so together they may exceed
  `images.store_mb` by what they write in that time. Nothing is removed: jobs and samples refer to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sized
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec
from PIL import Image

from sluice.pipeline.config.types import Config, ImagesConfig
from sluice.pipeline.errors import DataError, RequestError
from sluice.pipeline.files import fsync_directory, is_unfinished, remove_stale, write_atomic
from sluice.pipeline.images.decoders import Decoders
from sluice.pipeline.images.paths import Found, Roots, SourceUnavailable
from sluice.pipeline.images.pixels import check_encoded
from sluice.pipeline.prompts.rows import RowImage
from sluice.pipeline.wire.messages import ImageRef

if TYPE_CHECKING:
    from sluice.pipeline.images.urls import UrlFetcher


FETCHES = 16

_Flight = asyncio.Task[tuple[Image.Image, bool]]
_Refusal = RequestError | None
BYTES_PER_PIXEL = 4  # Pillow keeps RGB in 32 bits
_MAX_NAME = 200  # characters of a name


class ImageStore:
    """Use as `async with ImageStore(config) as images`; belongs to one event loop.

    `fetched` counts images that were read and decoded, `hits` those answered without a separate fetch. `decoders` may
    decode the caller's own bytes as well.
    """

    def __init__(self, config: ImagesConfig) -> None:
        self._source = ImageSource(config)
        self._cache = ImageCache(config.cache_mb * 2**20)
        self._flights: dict[ImageRef, _Flight] = {}
        self._fetches = asyncio.Semaphore(FETCHES)
        self.decoders = Decoders(config)
        self._decodes = asyncio.Semaphore(config.decode_processes)  # waiting for a process takes no thread
        self._closed = False
        self.fetched = 0
        self.hits = 0

    async def __aenter__(self) -> ImageStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def get(self, ref: ImageRef) -> Image.Image:
        """The image, mode RGB; shared with other callers, so `copy()` it before changing it.

        `image.info["sha256"]` is the digest of the bytes it was decoded from.
        Raises RequestError (SourceUnavailable if a later try may succeed); EngineError if no decoder can be started.
        """
        ref = normal_ref(ref)
        if self._closed:
            raise RequestError(f"{describe(ref)}: the image store is closed")
        flight, joined = self._flights.get(ref), True
        if flight is None:
            joined = False
            flight = self._flights[ref] = asyncio.create_task(self._fly(ref), name=f"fetch {describe(ref)}")
            flight.add_done_callback(_note_error)
        try:
            image, fresh = await asyncio.shield(flight)
        except asyncio.CancelledError:
            if self._closed and flight.cancelled() and not _is_cancelled():
                raise RequestError(f"{describe(ref)}: the image store was closed meanwhile") from None
            raise
        self.hits += joined or not fresh
        return image

    async def close(self) -> None:
        """Cancel running fetches, close connections and decoders, drop the images; callers get a RequestError."""
        self._closed = True
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        self._flights.clear()
        self._cache.clear()
        await asyncio.to_thread(self.decoders.close)
        await self._source.close()

    async def _fly(self, ref: ImageRef) -> tuple[Image.Image, bool]:
        """(image, whether it was fetched by this call)."""
        try:
            async with self._fetches:
                return await self._load(ref, describe(ref))
        finally:
            del self._flights[ref]

    async def _load(self, ref: ImageRef, where: str) -> tuple[Image.Image, bool]:
        kept = self._cache.get(ref.sha256) if ref.sha256 else None
        if kept is not None:
            return kept, False
        found, refusal = await self._source.find(ref, where)
        key: Hashable = ref.sha256 or found or ref.url
        if (kept := self._cache.get(key)) is not None:
            return kept, False
        data = await self._source.fetch(ref, found, refusal, where)
        async with self._decodes:
            image = await asyncio.to_thread(self._decode, data, ref.sha256, where)
        self._cache.put(key, image)
        self.fetched += 1
        return image, True

    def _decode(self, data: bytes, digest: str | None, where: str) -> Image.Image:
        found = check_digest(data, digest, where)
        image = self.decoders.decode(data, where)
        image.info["sha256"] = found
        return image


class ImageSource:
    """The bytes of references, from files and URLs; belongs to one event loop. The owner calls `close`."""

    def __init__(self, config: ImagesConfig) -> None:
        self._roots = Roots(config.roots, may_lack=config.store)
        self._config = config
        self._urls: UrlFetcher | None = None
        if config.hosts:
            self._fetcher()  # what is wrong with them is said at once
        self._max_bytes = int(config.max_mb * 2**20)

    async def read(self, ref: ImageRef) -> bytes:
        """Those with the reference's digest, if it has one. Raises RequestError, SourceUnavailable."""
        ref = normal_ref(ref)
        where = describe(ref)
        data = await self.fetch(ref, *await self.find(ref, where), where)
        await asyncio.to_thread(check_digest, data, ref.sha256, where)
        return data

    async def find(self, ref: ImageRef, where: str) -> tuple[Found | None, _Refusal]:
        """See `find_file`."""
        return await asyncio.to_thread(find_file, self._roots, ref, where)

    async def fetch(self, ref: ImageRef, found: Found | None, refusal: _Refusal, where: str) -> bytes:
        """The file that was found, else what the URL gives; digests aren't compared. Raises RequestError."""
        if found is not None:
            return await asyncio.to_thread(self._roots.read, found, self._max_bytes, where)
        try:
            return await self._fetcher().fetch(str(ref.url), where)
        except RequestError as error:
            if refusal is None:
                raise
            raise neither(error, refusal, where) from error

    async def close(self) -> None:
        if self._urls is not None:
            await self._urls.close()

    def _fetcher(self) -> UrlFetcher:
        """Its HTTP client takes 0.1 s to import, which a process without URLs needn't wait for."""
        if self._urls is None:
            from sluice.pipeline.images.urls import UrlFetcher

            self._urls = UrlFetcher(self._config)
        return self._urls


def normal_ref(ref: ImageRef) -> ImageRef:
    """Empty parts become None, the digest gets its canonical form. Raises RequestError when nothing is left."""
    ref = msgspec.structs.replace(ref, path=ref.path or None, url=ref.url or None, sha256=ref.sha256 or None)
    if ref.sha256 is not None:
        return msgspec.structs.replace(ref, sha256=normal_digest(ref.sha256, describe(ref)))
    if ref.path is None and ref.url is None:
        raise RequestError("image without a source: give a path, a url or a sha256")
    return ref


def find_file(roots: Roots, ref: ImageRef, where: str) -> tuple[Found | None, RequestError | None]:
    """The file a normal reference means, or None (and why its path doesn't apply) if its URL is to be used.

    Blocks; raises RequestError.
    """
    if ref.path is None and ref.url is not None:
        return None, None
    names = (ref.path,) if ref.path is not None else (str(ref.sha256), f"sha256/{ref.sha256}")
    try:
        return roots.find(where, *names), None
    except RequestError as error:
        if ref.url is None:
            raise
        return None, error


def neither(of_url: RequestError, of_path: RequestError, where: str) -> RequestError:
    """The error for an image that neither its URL nor its path gave; SourceUnavailable if one may on a later try."""
    later = isinstance(of_url, SourceUnavailable) or isinstance(of_path, SourceUnavailable)
    why = str(of_path).removeprefix(f"{where}: ")
    text = f"{of_url} (its path could not be used: {why})"
    return SourceUnavailable(text, getattr(of_url, "after_s", 0.0)) if later else RequestError(text)


def _note_error(flight: _Flight) -> None:
    """Mark the error as retrieved: the callers get it, unless all of them gave up."""
    if not flight.cancelled():
        flight.exception()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ImageCache:
    """Bounded by bytes of pixels; an image larger than the whole cache isn't kept."""

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
        """Add the image, evicting others until the bound holds."""
        self._drop(key)
        if _cost(image) > self._max_bytes:
            return
        self._images[key] = image
        self.num_bytes += _cost(image)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._images)))

    def clear(self) -> None:
        self._images.clear()
        self.num_bytes = 0

    def _drop(self, key: Hashable) -> None:
        image = self._images.pop(key, None)
        if image is not None:
            self.num_bytes -= _cost(image)


def _cost(image: Image.Image) -> int:
    return image.width * image.height * BYTES_PER_PIXEL


def normal_digest(text: str, where: str) -> str:
    """64 lower-case hexadecimal digits; a "sha256:" prefix is accepted. Raises RequestError."""
    digest = text.lower().removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise RequestError(f"{where}: its sha256 must be 64 hexadecimal digits, with or without 'sha256:' in front")
    return digest


def admit_images(images: Sized, limits: ImagesConfig, where: str) -> None:
    """Raise RequestError for more images than one prompt may have; nothing is fetched to find out."""
    if len(images) > limits.max_per_prompt:
        raise RequestError(
            f"{where}: {len(images)} images, and images.max_per_prompt allows {limits.max_per_prompt}; send fewer, or "
            "raise it for all roles of the run"
        )


def check_digest(data: bytes, expected: str | None, where: str) -> str:
    """The digest of the bytes. Raises RequestError unless it is the expected one; None accepts anything."""
    found = hashlib.sha256(data).hexdigest()
    if found != (expected or found):
        raise RequestError(
            f"{where}: its bytes have sha256 {found}, the job asks for {expected}; correct the reference or the image"
        )
    return found


def describe(ref: ImageRef) -> str:
    """For example "image 'a/b.png'" or "image http://host/b.png?… (sha256 0123456789ab…)"."""
    sources = [repr(_short(ref.path))] if ref.path else []
    if ref.url:
        sources.append(show_url(ref.url))
    digest = f"sha256 {_short(ref.sha256, 19)}" if ref.sha256 else ""
    if not sources:
        return f"image {digest or 'without a source'}"
    return f"image {' or '.join(sources)}" + (f" ({digest})" if digest else "")


def show_url(url: str) -> str:
    """The URL without user, password and query, which may be credentials; always printable."""
    address, query, _ = url.partition("?")
    scheme, colon, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    shown = f"{scheme}{colon}{authority.rpartition('@')[2]}{slash}{path.partition('#')[0]}{query and '?…'}"
    return _short(shown).encode("unicode_escape").decode() if not shown.isprintable() else _short(shown)


def _short(text: str, limit: int = _MAX_NAME) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


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
