"""Prompt sources: rows of JSONL, Parquet or Hugging Face `datasets`, and how far a run has read them.

A row: `messages` (list of {role, content}), optional `truth` (anything the task understands), `id` (string or
number, unique; otherwise the row's content is its identity), `images`, `metadata`. Malformed rows carry file and line.

`images`, or `image`, is one image or a list, as many as the messages have image parts and in their order: a path, a
URL, a `sha256:…` digest, {path, url, sha256}, or {bytes, path} as `datasets` stores images (base64 in JSONL; the path
is then only a name). Bytes are written below `images.store` and referenced by digest; the workers fetch all others.

A data set is a directory made by `save_to_disk`, or `hf:NAME[:CONFIG][:SPLIT]` from the hub. Its columns: `messages`,
else `prompt` (a string is one user message, after the row's images); `truth`, else `answer`; `id`, `images` or
`image`, and `metadata` as in JSONL. Other columns aren't read, and no image is decoded. Only data are read: `datasets`
itself refuses a data set with its own code.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from sluice.pipeline.config.types import Config, DataConfig, ImagesConfig
from sluice.pipeline.errors import ConfigError, DataError, RequestError
from sluice.pipeline.images.pixels import check_encoded
from sluice.pipeline.images.store import check_digest, normal_digest
from sluice.pipeline.images.writer import ImageWriter
from sluice.pipeline.logs import get_logger
from sluice.pipeline.prompts import rows
from sluice.pipeline.prompts.admission import Limits
from sluice.pipeline.prompts.rows import MAX_ROW_BYTES, Malformed, admit_row
from sluice.pipeline.queue import Credit
from sluice.pipeline.run.preflight import RowsFound
from sluice.pipeline.run.resume_point import read_cursor
from sluice.pipeline.run.role import Role
from sluice.pipeline.wire.codec import shown
from sluice.pipeline.wire.messages import ImageRef

_SAMPLE_BYTES = 1 << 20


class RowImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image of a row: a reference, or its bytes, which then count alone."""

    path: str | None = None
    url: str | None = None
    sha256: str | None = None
    data: bytes | None = msgspec.field(default=None, name="bytes")

    def __post_init__(self) -> None:
        if self.data is None and not (self.path or self.url or self.sha256):
            raise ValueError("an image has neither bytes nor path, url or sha256; give one")

    @property
    def ref(self) -> ImageRef:
        """As a job references it."""
        if self.data is not None:
            return ImageRef(sha256=sha256(self.data).hexdigest())
        return ImageRef(path=self.path, url=self.url, sha256=self.sha256)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    messages: list[dict[str, Any]]
    truth: Any = None
    id: str | int | None = None
    images: list[str | RowImage] | str | RowImage = []  # a list once it is read
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.images, list):
            msgspec.structs.force_setattr(self, "images", [self.images])
        rows.check_messages(self.messages)
        rows.check_images(self.messages, len(self.each_image()))

    def each_image(self) -> list[str | RowImage]:
        """The images in order."""
        return cast("list[str | RowImage]", self.images)

    def image_refs(self) -> list[ImageRef]:
        """The images as a job references them."""
        return [ImageRef.of(image) if isinstance(image, str) else image.ref for image in self.each_image()]


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
    check = partial(_check_bytes, limits=images or ImagesConfig())
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


def _check_bytes(row: Row, limits: ImagesConfig) -> None:
    """Raise RequestError for bytes that are no accepted picture."""
    for at, image in enumerate(row.each_image()):
        if isinstance(image, RowImage) and image.data is not None:
            where = f"`images[{at}]`"
            check_encoded(image.data, limits, where)
            if image.sha256:
                check_digest(image.data, normal_digest(image.sha256, where), where)


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


HUB = "hf:"
_COLUMNS = ("messages", "prompt", "truth", "answer", "id", "images", "image", "metadata")
_ENDS = 64  # rows the fingerprint reads at each end
_RowT = TypeVar("_RowT")


def is_dataset(path: str) -> bool:
    """Whether the path looks like a data set."""
    return path.startswith(HUB) or any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def count_dataset(path: str) -> int:
    """Rows, including malformed ones."""
    return len(_open_dataset(path))


def fingerprint_dataset(path: str) -> str:
    """Identity of the contents: number of rows, columns, and the rows at the beginning and end."""
    data = _open_dataset(path)
    ends = [*range(min(_ENDS, len(data))), *range(max(_ENDS, len(data) - _ENDS), len(data))]
    with _readable(path):
        rows = repr([_short(_plain(data[at])) for at in ends])
    return sha256(f"{len(data)}:{data.features}:{rows}".encode("utf-8", "backslashreplace")).hexdigest()[:24]


def read_dataset(
    path: str, kind: type[_RowT], limits: Limits | None = None, check: Callable[[_RowT], None] | None = None
) -> Iterator[_RowT | Malformed]:
    """The rows in order; raises DataError if the file is broken. `check` as in `rows.read_rows`."""
    for number, columns in enumerate(_dataset_rows(path), start=1):
        try:
            row = msgspec.convert(_mapped(columns), kind)
            admit_row(row, limits or Limits())
            if check is not None:
                check(row)
            yield row
        except (msgspec.ValidationError, ValueError, RequestError) as error:
            yield Malformed(f"{path}: row {number}", f"malformed row: {error}")


def _dataset_rows(path: str) -> Iterator[dict[str, Any]]:
    with _readable(path):
        yield from map(_plain, _open_dataset(path))


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # Arrow and the image decoders raise many kinds of errors
        raise DataError(f"{path}: a row cannot be read with datasets ({error!r}); rebuild the data set") from error


def _mapped(columns: dict[str, Any]) -> dict[str, Any]:
    tree = rows.given_columns(columns)
    prompt, answer = tree.pop("prompt", None), tree.pop("answer", None)
    if prompt is not None:
        asked = [{"role": "user", "content": _shown(prompt, tree)}] if isinstance(prompt, str) else prompt
        tree.setdefault("messages", asked)
    if answer is not None:
        tree.setdefault("truth", answer)
    return tree


def _shown(prompt: str, columns: dict[str, Any]) -> Any:
    """What the user says: the row's images, then the prompt."""
    images = columns.get("images", [])
    if not (count := len(images) if isinstance(images, list) else 1):
        return prompt
    return [*[{"type": "image"}] * count, {"type": "text", "text": prompt}]


def _open_dataset(path: str) -> Any:
    module = _datasets()
    try:
        data = _from_hub(module, path) if path.startswith(HUB) else module.load_from_disk(path)
    except (OSError, ValueError, RuntimeError, module.exceptions.DatasetsError) as error:
        raise DataError(f"{path}: cannot be read with datasets ({error}); {_USE}") from error
    if isinstance(data, dict):
        raise DataError(f"{path}: holds the splits {', '.join(data)}; name one: {path.rstrip('/')}/{next(iter(data))}")
    kept = [name for name in _COLUMNS if name in data.column_names]
    if not {"messages", "prompt"} & set(kept):
        raise DataError(f"{path}: has neither `messages` nor `prompt`, but {', '.join(data.column_names)}; rename one")
    data = data.select_columns(kept)
    pictures = [data.features[name] for name in ("images", "image") if name in kept]
    if any(isinstance(getattr(one, "feature", one), module.Image) for one in pictures):
        return data.with_format("arrow")  # the stored bytes and path; datasets would decode them
    return data


def _short(value: Any) -> Any:
    """The same with digests for bytes."""
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    return sha256(value).digest() if isinstance(value, bytes) else value


def _plain(row: Any) -> dict[str, Any]:
    """The columns of a row, whatever the format."""
    return row if isinstance(row, dict) else row.to_pylist()[0]


_USE = "give a directory made by save_to_disk, or hf:NAME[:CONFIG][:SPLIT] if the Hub is reachable"


def _from_hub(module: Any, path: str) -> Any:
    name, *rest = path.removeprefix(HUB).split(":")
    split = rest.pop() if rest else "train"
    if not name or len(rest) > 1:
        raise DataError(f"{path}: not the name of a data set; write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    return module.load_dataset(name, *rest, split=split)


def _datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise DataError("data sets need Hugging Face datasets: pip install 'sluice[data]', or give JSONL") from error


BEFORE_FIRST = "-1:-1"  # the cursor before the first row


class SourceProgress:
    """Which data a run reads, how far it got, what it skipped: stored in Redis, owned by the run's one producer."""

    def __init__(self, role: Role) -> None:
        self._client: Any = role.client
        self._key, self._config = role.keys.source, role.config
        self._malformed = 0

    async def open(self, total: int, credit: Credit) -> str:
        """Bind the run to its data and announce the total; returns the cursor of the last job."""
        held = await cast("Awaitable[dict[bytes, bytes]]", self._client.hgetall(self._key))
        data = await asyncio.to_thread(fingerprint, self._config.data)
        if note := refuse_other_source(self._config, held, data):
            get_logger().warning(note, path=self._config.data.path)
        limits = {  # for status pages
            "max_in_flight": credit.max_in_flight,
            "max_bytes": credit.max_bytes,
            "per_version": credit.samples_per_version,
            "staleness": credit.max_staleness,
            "group": self._config.producer.group_size,
        }
        path = self._config.data.path
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

    def skip(self, row: Malformed) -> None:
        """Count a malformed row, or raise its DataError if the config says stop."""
        if self._config.data.on_malformed == "stop":
            raise row.error()
        self._malformed += 1
        get_logger().warning("row skipped", where=row.where, problem=row.problem)

    def rewind(self) -> None:
        """Restart reading at the first row."""
        self._malformed = 0

    async def store_skipped(self) -> None:
        """Store the count since the first row, so a restart counts no row twice."""
        if self._malformed:
            await self._set(malformed=self._malformed)

    async def finish(self) -> None:
        """Announce that no more rows will come."""
        await self._set(exhausted=1)

    async def _set(self, **values: Any) -> None:
        await cast("Awaitable[int]", self._client.hset(self._key, mapping=values))


def refuse_other_source(config: Config, held: dict[bytes, bytes], data: str) -> str | None:
    """Raise ConfigError if the run was started on different data; returns any warning.

    Other data under a known run name would be skipped silently. `held` is the broker's record of the source, `data` the
    file's fingerprint.
    """
    run, path = config.run, config.data.path
    name_it = "use another run name (--set run=NAME)"
    if held.get(b"data", data.encode()) == data.encode():
        return None
    if held.get(b"exhausted") == b"1" or held.get(b"path") != path.encode():
        raise ConfigError(f"run {run!r} was started on other data than {path}; {name_it}, or restore the file")
    return "the data file has changed; its first rows are not read again"


def look_at_rows(config: Config, patience_s: float) -> RowsFound:
    """Read one epoch's rows for at most `patience_s`; raises DataError for an unreadable file."""
    until = time.monotonic() + patience_s
    total, read, malformed, first = count_rows(config.data), 0, 0, None
    for row in read_prompts(config):
        read += 1
        if isinstance(row, Malformed):
            malformed += 1
            first = first or f"{row.where}: {row.problem}"
        if time.monotonic() > until:
            break
    return RowsFound(rows=total, read=read, malformed=malformed, first_malformed=first)


def look_at_source(config: Config, held: dict[bytes, bytes]) -> str:
    """Warnings about resuming from `held`, the broker's record of the source; raises ConfigError, DataError."""
    return refuse_other_source(config, held, fingerprint(config.data)) or "started on these data"
