"""Prompt sources: rows of JSONL, Parquet or Hugging Face `datasets`, and how far a run has read them.

A row: `messages` (list of {role, content}), optional `truth` (anything the task understands), `id` (string or
number, unique; otherwise the row's content is its identity), `images`, `metadata`. Malformed rows carry file and line.

`images`, or `image`, is one image or a list, as many as the messages have image parts and in their order: a path, a
URL, a `sha256:…` digest, {path, url, sha256}, or {bytes, path} as `datasets` stores images (base64 in JSONL; the path
is then only a name). Bytes are written below `images.store` and referenced by digest; the workers fetch all others.

Columns of a data set: see `pipeline/prompts/rows.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from sluice.pipeline.broker.scripts.streams import SetSource, SourceField, SourceKeys
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import Config, DataConfig, ImagesConfig
from sluice.pipeline.errors import ConfigError, DataError, RequestError
from sluice.pipeline.images.paths import Roots
from sluice.pipeline.images.store import ImageWriter, admit_bytes, describe, find_file, images_of_run
from sluice.pipeline.logs import get_logger
from sluice.pipeline.prompts import rows
from sluice.pipeline.prompts.admission import Limits
from sluice.pipeline.prompts.rows import (
    MAX_ROW_BYTES,
    ImageRow,
    Malformed,
    RowImage,
    count_dataset,
    fingerprint_dataset,
    is_dataset,
    read_dataset,
)
from sluice.pipeline.queue import Credit
from sluice.pipeline.queue.types import read_cursor, why_refused
from sluice.pipeline.run.preflight import FirstRow, RowsFound
from sluice.pipeline.run.role import Role
from sluice.pipeline.wire.codec import integer_or, shown

_SAMPLE_BYTES = 1 << 20
_FIRST_IMAGES = 16

T = TypeVar("T")


class Row(ImageRow, frozen=True, kw_only=True):
    """One prompt."""

    messages: list[dict[str, Any]]
    truth: Any = None
    id: str | int | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        rows.check_messages(self.messages)
        rows.check_images(self.messages, len(self.each_image()))


def identity(row: Row) -> str:
    """A row's identity: its id, else its messages and images. `1` and `"1"` are two ids."""
    images = [image if isinstance(image, str) else image.ref for image in row.each_image()]
    content: Any = [row.messages, images] if images else row.messages
    return msgspec.json.encode(content if row.id is None else row.id).decode()


def fingerprint(config: DataConfig) -> str:
    """Identity of the data file: its length and the bytes at its beginning and end."""
    if _is_dataset(config):
        return fingerprint_dataset(config.path)
    path = _existing(config)
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_SAMPLE_BYTES)
        stream.seek(max(0, size - _SAMPLE_BYTES))
        return sha256(f"{size}:".encode() + head + stream.read()).hexdigest()[:24]


def count_rows(config: DataConfig) -> int:
    """Rows of one epoch, including malformed ones."""
    if _is_dataset(config):
        total = count_dataset(config.path)
    else:
        total = rows.count_rows(_existing(config), parquet=_is_parquet(config))
    return total if config.limit is None else min(total, config.limit)


def read_rows(
    config: DataConfig, limits: Limits | None = None, images: ImagesConfig | None = None
) -> Iterator[Row | Malformed]:
    """The rows of one epoch in file order; `limits` are the model's, `images` those of a picture's bytes."""
    limit = images or ImagesConfig()

    def check(row: Row) -> None:
        admit_bytes(row.each_image(), limit)

    if _is_dataset(config):
        found = read_dataset(config.path, Row, limits, check)
    else:
        options: dict[str, Any] = {"max_row_bytes": MAX_ROW_BYTES, "limits": limits, "check": check}
        found = rows.read_rows(_existing(config), Row, parquet=_is_parquet(config), **options)
    for position, row in enumerate(found):
        if config.limit is not None and position >= config.limit:
            return
        yield row


def read_prompts(config: Config) -> Iterator[Row | Malformed]:
    """The rows of one epoch within the limits of the run's model and images."""
    limits = Limits.of_model(config.model.path, images=config.images.max_per_prompt)
    return read_rows(config.data, limits, config.images)


def stored(row: Row, writer: ImageWriter) -> Row:
    """The row with digests for its images' bytes, which are then on disk. Blocks; raises RequestError, StoreError."""
    if not any(isinstance(image, RowImage) and image.data is not None for image in row.each_image()):
        return row
    images: list[str | RowImage] = []
    for at, image in enumerate(row.each_image()):
        if isinstance(image, RowImage) and image.data is not None:
            image = RowImage(sha256=writer.put(image.data, f"images[{at}]"))
        images.append(image)
    return msgspec.structs.replace(row, images=images)


def _is_dataset(config: DataConfig) -> bool:
    if config.format == "auto":
        return is_dataset(config.path)
    return config.format == "datasets" and bool(config.path)


def _existing(config: DataConfig) -> Path:
    if not config.path:
        raise DataError("data.path is not set; give --data FILE.jsonl, FILE.parquet, a saved data set or hf:NAME")
    path = Path(config.path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; data.path must name a JSONL or Parquet file")
    return path


def _is_parquet(config: DataConfig) -> bool:
    return rows.is_parquet(config.path) if config.format == "auto" else config.format == "parquet"


BEFORE_FIRST = "-1:-1"  # the cursor before the first row
_NO_ROW = (-1, -1)


class SourceProgress:
    """Which data a run reads, how far it got, what it skipped: stored in Redis, fenced by the role of its producer."""

    def __init__(self, role: Role, owner: Ownership) -> None:
        self._client: Any = role.client
        self._scripts, self._owner = role.scripts, owner
        self._key, self._config = role.keys.source, role.config
        self._data = ""
        self._malformed, self._malformed_to = 0, _NO_ROW  # rows, and the last of them

    async def open(self, total: int, credit: Credit) -> str:
        """Bind the run to its data and announce the total; returns the cursor of the last job."""
        held = await self._read()
        self._data = await asyncio.to_thread(fingerprint, self._config.data)
        if note := refuse_other_source(self._config, held, self._data):
            get_logger().warning(note, path=self._config.data.path)
        limits = {  # for status pages
            "max_in_flight": credit.max_in_flight,
            "max_bytes": credit.max_bytes,
            "per_version": credit.samples_per_version,
            "staleness": credit.max_staleness,
            "group": self._config.producer.group_size,
        }
        path = self._config.data.path
        data = held.get(b"data", self._data)  # a changed file's is stored at its end: until then each start warns
        await self._set(data=data, path=path, total=total, exhausted=0, **limits)
        return self._cursor(held.get(b"cursor", BEFORE_FIRST.encode()))

    def _cursor(self, raw: bytes) -> str:
        """The position of a damaged cursor is unknown: reading restarts at the first row and skips known rows."""
        if (place := read_cursor(raw)) is not None:
            return f"{place[0]}:{place[1]}"
        get_logger().warning(
            "the stored position in the data is invalid; reading from the first row",
            key=self._key,
            cursor=shown(raw),
            help="HSET that key's field cursor to EPOCH:ROW, both from 0, and restart to continue after that row",
        )
        return BEFORE_FIRST

    def skip(self, row: Malformed, epoch: int, number: int) -> None:
        """Count a malformed row, once in the run, or raise its DataError if the config says stop."""
        if self._config.data.on_malformed == "stop":
            raise row.error()
        if (epoch, number) > self._malformed_to:
            self._malformed, self._malformed_to = self._malformed + 1, (epoch, number)
            get_logger().warning("row skipped", where=row.where, problem=row.problem)

    async def store_skipped(self) -> None:
        """Store the count; call it before rows that follow are enqueued, as a restart reads none before the cursor."""
        if self._malformed:
            epoch, number = self._malformed_to
            await self._set(malformed=self._malformed, malformed_to=f"{epoch}:{number}")

    async def rewind(self) -> None:
        """Go back to the count that the broker has, which lost its newest writes."""
        await self._read()

    async def finish(self, cursor: str) -> None:
        """Announce that no more rows will come. Each start resets `exhausted`; `cursor` stays as the end.

        Raises SourceRewound if the broker has lost what was enqueued up to `cursor`.
        """
        await self._set(cursor, data=self._data, end=cursor, exhausted=1)

    async def _read(self) -> dict[bytes, bytes]:
        """The broker's record, and the count in it; an earlier release's is of the rows up to the cursor."""
        held = await cast("Awaitable[dict[bytes, bytes]]", self._client.hgetall(self._key))
        places = (read_cursor(held.get(name, b"")) for name in (b"malformed_to", b"cursor"))
        self._malformed_to = next((place for place in places if place is not None), _NO_ROW)
        self._malformed = integer_or(held.get(b"malformed"), 0)
        return held

    async def _set(self, behind: str = "", /, **values: str | bytes | int) -> None:
        names = SourceKeys(source=self._key, owner=self._owner.key)
        fields = [SourceField(name, value) for name, value in values.items()]
        request = SetSource(nonce=self._owner.nonce, cursor_before=behind, fields=fields)
        if refused := await self._scripts.ask(names, request):
            raise await why_refused(self._scripts, self._owner.key, refused)


def refuse_other_source(config: Config, held: dict[bytes, bytes], data: str) -> str | None:
    """Raise ConfigError if the run was started on different data; returns any warning.

    Other data under a known run name would be skipped silently. `held` is the broker's record of the source, `data` the
    file's fingerprint.
    """
    run, path = config.run, config.data.path
    name_it = "use another run name (--set run=NAME)"
    if held.get(b"data", data.encode()) == data.encode():
        return None
    is_read = held.get(b"exhausted") == b"1" or (b"end" in held and held[b"end"] == held.get(b"cursor"))
    if is_read or held.get(b"path") != path.encode():
        raise ConfigError(f"run {run!r} was started on other data than {path}; {name_it}, or restore the file")
    return "the data file has changed; its first rows are not read again"


def look_at_rows(config: Config, max_s: float) -> RowsFound:
    """Read one epoch's rows for at most `max_s`.

    Raises DataError for an unreadable file, or if none of the first images that rows name by path is here.
    """
    until = time.monotonic() + max_s
    read, malformed, truths, first, all_read = 0, 0, 0, None, True
    images = FirstImages(config)
    for row in read_prompts(config):
        if time.monotonic() >= until:
            all_read = False
            break
        read += 1
        if isinstance(row, Malformed):
            malformed += 1
            first = first or f"{row.where}: {row.problem}"
            continue
        truths += row.truth is not None
        images.look_at(read, row)
    images.refuse()
    return RowsFound(read=read, all_read=all_read, malformed=malformed, first_malformed=first, truths=truths)


class FirstImages:
    """Whether workers on this host would find the first images that rows name by path.

    One that is missing costs its own row; if all are, images.roots is another directory than the paths begin at.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._left = _FIRST_IMAGES if config.worker.count else 0  # else the workers' hosts may have others
        images = images_of_run(config)
        self._roots = Roots(images.roots, may_lack=images.store)
        self._problem, self._found = "", False

    def look_at(self, number: int, row: Row) -> None:
        """Row `number` of the file, from 1. Blocks."""
        for ref in row.image_refs() if self._left else ():
            if ref.path is None or ref.url is not None:
                continue
            self._left -= 1
            try:
                find_file(self._roots, ref, describe(ref))
                self._found = True
            except RequestError as error:
                self._problem = self._problem or f"{self._config.data.path}: row {number}: {error}"
            if not self._left:
                return

    def refuse(self) -> None:
        """Raises DataError."""
        if self._problem and not self._found:
            roots = ", ".join(self._config.images.roots) or "none"
            raise DataError(
                f"{self._problem}; no image of the first rows is here. Set images.roots ({roots}) to the directory "
                "that their paths begin at"
            )


def first_rows(config: Config, count: int) -> list[FirstRow]:
    """The first usable rows; raises DataError for an unreadable file."""
    found: list[FirstRow] = []
    for number, row in enumerate(read_prompts(config), start=1):
        if isinstance(row, Row):
            place = f"{config.data.path}, row {number}"
            refs, more = row.image_refs(), {**row.metadata, "row": identity(row), "epoch": 0}  # as in its job
            found.append(FirstRow(where=place, messages=row.messages, truth=row.truth, images=refs, metadata=more))
        if len(found) >= count:
            break
    return found


def read_first(config: Config, count: int, make: Callable[[Row], T]) -> list[T]:
    """What `make` makes of the first `count` rows; DataError for a malformed row, or one for which it raises
    RequestError.
    """
    found: list[T] = []
    for number, row in enumerate(islice(read_prompts(config), count), 1):
        if isinstance(row, Malformed):
            raise row.error()
        try:
            found.append(make(row))
        except RequestError as error:
            raise DataError(f"{config.data.path}: row {number}: {error}") from error
    return found


def look_at_source(config: Config, held: dict[bytes, bytes]) -> str:
    """Warnings about resuming from `held`, the broker's record of the source; raises ConfigError, DataError."""
    return refuse_other_source(config, held, fingerprint(config.data)) or "started on these data"
