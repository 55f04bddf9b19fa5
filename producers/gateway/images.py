"""The images of a request: checked, stored by digest if sent as bytes, and listed in the order of the parts.

    image_url ─┬─ http(s)://…  of a host in images.hosts ──────────────▶ ImageRef(url=…), which a worker fetches
               ├─ data:…       within images.max_mb ─▶ images.store ───▶ ImageRef(sha256=…)
               └─ sha256:…     in images.store already ────────────────▶ ImageRef(sha256=…)

- Taking and storing are two steps: what is refused for another reason, such as a closed rollout, leaves no picture.
- All parts are counted and checked before anything is decoded, and base64 is decoded off the event loop. Pixels are
  never decoded here: a worker does that, in a separate process.
- In messages the digest replaces the bytes. So a later turn, which sends the bytes again, has the same history, and the
  queue carries no bytes.
- The worker fetches URLs and checks host and address again; checking here tells the caller immediately.
"""

from __future__ import annotations

import asyncio
import binascii
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DeadlineExceeded, RequestError
from sluice.pipeline.http.addresses import AllowedHosts
from sluice.pipeline.images.paths import too_large
from sluice.pipeline.images.store import ImageWriter, StoreError, normal_digest
from sluice.pipeline.prompts.admission import image_url, is_data_url, media_kind
from sluice.pipeline.thread_pool import ThreadPool
from sluice.pipeline.wire.messages import ImageRef, Message
from sluice.producers.gateway.refusals import Refusal

_DATA_HEAD = re.compile(r"data:image/[a-z0-9.+-]{1,40}(;[a-z0-9=_.-]{1,40}){0,4};base64", re.IGNORECASE)
_LONGEST_HEAD = 256
_WRITERS, _WRITE_S = 4, 60.0
_Made = TypeVar("_Made")
FULL_DETAIL = (None, "auto", "high")
"""What a part may ask of its image's `detail`: images are processed as model.preprocess says."""

_TAKEN = "an image must be an http or https URL, data:image/…;base64,…, or sha256:… of a picture in images.store"


class Taken(NamedTuple):
    """The images of a request."""

    messages: list[Message]  # as they travel: each image part is its reference alone
    refs: list[ImageRef]  # in the order of the parts
    pictures: list[tuple[str, bytes]]  # (place, bytes) of images sent inline; stored before a job refers to them


class RequestImages:
    """Puts the images of requests into one run's store; must be closed."""

    def __init__(self, config: Config, *, model_takes_images: bool = True) -> None:
        self._limits, self._writer = config.images, ImageWriter.of(config)
        self._model_takes_images = model_takes_images
        self._hosts = AllowedHosts(config.images.hosts, "images.hosts")
        self._pool = ThreadPool("images", _WRITERS)

    def close(self) -> None:
        """Start no more work."""
        self._pool.close()

    async def of_messages(self, messages: Sequence[Message], until: float) -> Taken:
        """Those of the messages' parts; by `until` on the monotonic clock. Nothing is stored. Raises Refusal."""
        places = _parts(messages)
        given = [(where, image_url(part)) for _, _, where, part in places]
        return await self._taken(messages, places, given, self._all_checked(given), until)

    async def of_list(self, messages: Sequence[Message], urls: Sequence[str], where: str, until: float) -> Taken:
        """The same for images sent beside the messages; URLs in the messages' parts are ignored. Raises Refusal."""
        given = [(f"{where}.{at}", url) for at, url in enumerate(urls)]
        checked, places = self._all_checked(given), _parts(messages)
        if len(places) != len(urls):
            message = f"{where}: {len(urls)} images, and the messages have {len(places)} image parts; give as many"
            raise Refusal(400, message, where)
        return await self._taken(messages, places, given, checked, until)

    async def store(self, taken: Taken, until: float) -> None:
        """Write the pictures; jobs may refer to them then. Raises Refusal."""
        for where, data in taken.pictures:
            await self._run(partial(self._writer.put, data, where), where, until)

    async def _taken(
        self,
        messages: Sequence[Message],
        places: Sequence[_Place],
        given: Sequence[tuple[str, object]],
        checked: Sequence[ImageRef | str],
        until: float,
    ) -> Taken:
        refs: list[ImageRef] = []
        pictures: list[tuple[str, bytes]] = []
        for one, (where, _) in zip(checked, given, strict=True):
            if isinstance(one, str):
                digest, data = await self._run(partial(self._decoded, one, where), where, until)
                pictures.append((where, data))
                one = ImageRef(sha256=digest)
            refs.append(one)
        return Taken(_with_references(messages, places, refs), refs, pictures)

    def _all_checked(self, given: Sequence[tuple[str, object]]) -> list[ImageRef | str]:
        most = self._limits.max_per_prompt
        if len(given) > most:
            where = given[most][0]
            raise Refusal(400, f"{where}: {len(given)} images; at most {most} are taken (images.max_per_prompt)", where)
        if given and not self._model_takes_images:
            where = given[0][0]
            raise Refusal(400, f"{where}: an image, and this model takes none; take it out", where)
        return [self._checked(url, where) for where, url in given]

    def _checked(self, url: object, where: str) -> ImageRef | str:
        """A reference, or the base64 of a data URL that is not too long. Raises Refusal."""
        if is_data_url(url):
            return self._base64(url, where)
        if isinstance(url, str) and url.lower().startswith(("http://", "https://")):
            try:
                self._hosts.admit(url, where)
            except RequestError as error:
                raise Refusal(400, str(error), where) from error
            return ImageRef(url=url)
        if isinstance(url, str) and url.lower().startswith("sha256:"):
            return self._known(url, where)
        raise Refusal(400, f"{where}: {_TAKEN}; files are not accepted", where)

    def _base64(self, url: str, where: str) -> str:
        comma = url.find(",", 0, _LONGEST_HEAD)
        if comma < 0 or not _DATA_HEAD.fullmatch(url, 0, comma):
            raise Refusal(
                400, f"{where}: a data URL begins with data:image/…;base64, as in data:image/png;base64,…", where
            )
        max_bytes = int(self._limits.max_mb * 2**20)
        num_bytes = (len(url) - comma - 1) * 3 // 4 - url.count("=", len(url) - 2)
        if num_bytes > max_bytes:
            raise Refusal(413, str(too_large(num_bytes, max_bytes, where)), where)
        return url[comma + 1 :]

    def _known(self, url: str, where: str) -> ImageRef:
        try:
            digest = normal_digest(url, where)
        except RequestError as error:
            raise Refusal(400, str(error), where) from error
        if not self._writer.has(digest):
            raise Refusal(400, f"{where}: no picture with this digest is in images.store; send its bytes", where)
        return ImageRef(sha256=digest)

    async def _run(self, work: Callable[[], _Made], where: str, until: float) -> _Made:
        """Raises Refusal."""
        left_s = until - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(left_s):
                return await self._pool.run(work, timeout_s=min(left_s, _WRITE_S), what="storing the picture")
        except StoreError as error:
            raise Refusal(507, f"{where}: {error}", where, final=True) from error
        except TimeoutError as error:
            message = f"{where}: no time was left to store the picture (gateway.request_timeout_s)"
            raise Refusal(504, message, where) from error
        except DeadlineExceeded as error:
            raise Refusal(503, f"{where}: {error}; check the disk of images.store", where) from error
        except RequestError as error:
            raise Refusal(400, str(error), where) from error

    def _decoded(self, encoded: str, where: str) -> tuple[str, bytes]:
        """The digest and the bytes of a picture."""
        try:
            data = binascii.a2b_base64(encoded, strict_mode=True)
        except ValueError as error:  # binascii.Error is a ValueError; non-ASCII text raises one too
            raise RequestError(f"{where}: the data URL holds no base64 ({error})") from error
        return self._writer.digest(data, where), data


_Place = tuple[int, int, str, dict[str, Any]]  # message, part, both as a path, the part


def _parts(messages: Sequence[Message]) -> list[_Place]:
    """The image parts in order. Raises Refusal (400) for one that is neither an image nor a text."""
    found: list[_Place] = []
    for place, message in enumerate(messages):
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            where = f"messages.{place}.content.{at}"
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str) and not media_kind(part):
                continue
            if kind not in ("image_url", "image"):
                raise Refusal(
                    400, f"{where}: a part must be of type text, with a text, or image_url, not {kind!r:.40}", where
                )
            asked = part.get("image_url")
            if isinstance(asked, dict) and asked.get("detail") not in FULL_DETAIL:
                where = f"{where}.image_url.detail"
                raise Refusal(400, f"{where}: images are processed as model.preprocess says; remove it", where)
            found.append((place, at, where, part))
    return found


def _with_references(messages: Sequence[Message], places: Sequence[_Place], refs: Sequence[ImageRef]) -> list[Message]:
    """The messages with each image part as its reference alone: the same picture is the same part in every call."""
    made = list(messages)
    for (place, at, _, _), ref in zip(places, refs, strict=True):
        content = list(made[place]["content"])
        url = ref.url if ref.sha256 is None else f"sha256:{ref.sha256}"
        content[at] = {"type": "image_url", "image_url": {"url": url}}
        made[place] = {**made[place], "content": content}
    return made
