"""Rows of JSONL or Parquet files as typed structs.

- Rows come in file order, one at a time. An unusable row is a `Malformed` with file and line; the others are still
  read.
- A damaged row group of a Parquet file costs only its own rows; each becomes a `Malformed`.
- A column without a value (null) is as good as absent. `image` is another name of `images`.
- Blank lines aren't rows but count as lines; a byte order mark isn't part of the first row.
"""

from __future__ import annotations

import codecs
import importlib
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec

from sluice.pipeline.errors import DataError, RequestError, how_to_install
from sluice.pipeline.prompts.admission import Limits, admit_json, admit_prompt, image_parts, image_url, is_data_url
from sluice.pipeline.wire.codec import lone_surrogate_in_json, no_plain_value
from sluice.pipeline.wire.messages import ImageRef

MAX_ROW_BYTES = 16 << 20
# pyarrow's own errors are these, or subclasses of them.
_DAMAGE = (OSError, ValueError, OverflowError, MemoryError, NotImplementedError, TypeError, KeyError, IndexError)
_BATCH_ROWS, _BATCH_BYTES = 256, 32 << 20  # read at a time: rows with pictures are large
_BUFFER_BYTES = 1 << 20  # of a column; without it a row group is read whole
_PARQUET_ENDINGS = (".parquet", ".pq")
_RowT = TypeVar("_RowT")


class Malformed(msgspec.Struct, frozen=True):
    """An unusable row."""

    where: str  # file:line
    problem: str

    def error(self) -> DataError:
        """The same as an exception."""
        return DataError(f"{self.where}: {self.problem}")


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


class ImageRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that may have images."""

    images: list[str | RowImage] | str | RowImage = []  # a list once it is read

    def __post_init__(self) -> None:
        if not isinstance(self.images, list):
            msgspec.structs.force_setattr(self, "images", [self.images])

    def each_image(self) -> list[str | RowImage]:
        """The images in order."""
        return cast("list[str | RowImage]", self.images)

    def image_refs(self) -> list[ImageRef]:
        """The images as a job references them."""
        return [ImageRef.of(image) if isinstance(image, str) else image.ref for image in self.each_image()]


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless there is at least one message, and each has a role and content."""
    if not messages:
        raise ValueError("`messages` is empty; give at least one {role, content}")
    for position, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"`messages[{position}]` needs a `role` string and `content`")


def check_images(messages: Sequence[dict[str, Any]], count: int) -> None:
    """Raise ValueError unless the messages have as many image parts as the row has images."""
    parts = image_parts(messages)
    if len(parts) != count:
        raise ValueError(
            f'`images` has {count} entries and the messages have {len(parts)} image parts ({{"type": "image"}}); '
            "give one image for each part, in the order of the parts"
        )
    if any(is_data_url(image_url(part)) for part in parts):
        raise ValueError("an image part of the messages holds a data URL; give its bytes in `images`")


def given_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns that have a value, `image` as `images`, and plain bytes there as {"bytes": …}. Raises ValueError."""
    given = {name: value for name, value in columns.items() if value is not None}
    if "image" in given:
        if "images" in given:
            raise ValueError("the row has both `image` and `images`; give one")
        image = given.pop("image")
        given["images"] = image if isinstance(image, list) else [image]
    images = given.get("images")
    if isinstance(images, bytes):
        given["images"] = [{"bytes": images}]
    elif isinstance(images, list):
        several = cast("list[Any]", images)
        given["images"] = [{"bytes": one} if isinstance(one, bytes) else one for one in several]
    return given


def admit_row(row: object, limits: Limits) -> None:
    """Raise ValueError for a row with a prompt that costs too much, or with values the wire can't carry."""
    fields = {name: getattr(row, name) for name in getattr(row, "__struct_fields__", ())}
    if problem := no_plain_value(fields, ""):
        raise ValueError(problem)
    try:
        admit_prompt(getattr(row, "messages", None) or getattr(row, "prompt", None), None, limits, "`messages`")
    except RequestError as error:
        raise ValueError(str(error)) from error


def is_parquet(path: str | Path) -> bool:
    """By its name."""
    return str(path).endswith(_PARQUET_ENDINGS)


def read_rows(
    path: Path,
    kind: type[_RowT],
    *,
    parquet: bool,
    name: str = "",
    max_row_bytes: int = MAX_ROW_BYTES,
    limits: Limits | None = None,
    check: Callable[[_RowT], None] | None = None,
) -> Iterator[_RowT | Malformed]:
    """The rows of a file; `name` replaces the path in messages. Raises DataError for a damaged Parquet file.

    `check` refuses a row with ValueError or RequestError.
    """

    def admit(row: _RowT) -> None:
        admit_row(row, limits or Limits())
        if check is not None:
            check(row)

    if parquet:
        return _read_parquet(path, kind, name or str(path), admit)
    return _read_jsonl(path, kind, name or str(path), max_row_bytes, admit)


def count_rows(path: Path, *, parquet: bool) -> int:
    """Rows of a file, including malformed ones."""
    if parquet:
        return int(_parquet_file(path).metadata.num_rows)
    with path.open("rb") as stream:
        return sum(1 for line, _ in _lines(stream, MAX_ROW_BYTES) if line.strip())


def parquet_module() -> Any:
    """`pyarrow.parquet`; raises DataError if it isn't installed."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise DataError(f"Parquet needs pyarrow: {how_to_install('data')}, or give JSONL") from error


def _read_jsonl(
    path: Path, kind: type[_RowT], name: str, max_row_bytes: int, admit: Callable[[_RowT], None]
) -> Iterator[_RowT | Malformed]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    with path.open("rb") as stream:
        for number, (raw, size) in enumerate(_lines(stream, max_row_bytes), start=1):
            where = f"{name}:{number}"
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if not line.strip():
                continue
            if size > max_row_bytes:
                yield Malformed(where, f"{size} bytes; a row may have at most {max_row_bytes}")
                continue
            try:
                admit_json(line, "the row")
                row = msgspec.convert(given_columns(decoder.decode(line)), kind)
                admit(row)
            except (msgspec.MsgspecError, ValueError, RequestError, RecursionError) as error:
                yield Malformed(where, f"malformed row: {lone_surrogate_in_json(line, '') or error}")
            else:
                yield row


def _lines(stream: IO[bytes], most: int) -> Iterator[tuple[bytes, int]]:
    """(line, its length); of a line that is too long, only the beginning is kept."""
    while head := stream.readline(most + 1):
        size, last = len(head), head
        while not last.endswith(b"\n") and (last := stream.readline(most + 1)):
            size += len(last)
        yield head, size


def _read_parquet(
    path: Path, kind: type[_RowT], name: str, admit: Callable[[_RowT], None]
) -> Iterator[_RowT | Malformed]:
    file = _parquet_file(path)
    number = 0
    for group in range(file.num_row_groups):
        begin, problem = number, "it holds fewer rows than its file says"
        num_rows = int(file.metadata.row_group(group).num_rows)
        try:
            for tree in _trees(file, group):
                number += 1
                yield _row(tree, kind, f"{name}: row {number}", admit)
        except _DAMAGE as error:
            problem = str(error) or repr(error)
        for lost in range(number + 1, begin + num_rows + 1):
            yield Malformed(f"{name}: row {lost}", f"row group {group} is damaged ({problem}); write the file again")
        number = begin + num_rows


def _row(tree: Any, kind: type[_RowT], where: str, admit: Callable[[_RowT], None]) -> _RowT | Malformed:
    try:
        if isinstance(tree, Exception):
            raise ValueError(str(tree)) from tree
        row = msgspec.convert(given_columns(tree), kind)
        admit(row)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError, RequestError) as error:
        return Malformed(where, f"malformed row: {error}")
    return row


def _trees(file: Any, group: int) -> Iterator[dict[str, Any] | Exception]:
    """The rows of a row group; a row that can't be converted is its error."""
    about = file.metadata.row_group(group)
    row_bytes = int(about.total_byte_size) // max(1, int(about.num_rows))
    rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))
    for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
        try:
            yield from batch.to_pylist()
        except (ValueError, OverflowError):  # text that isn't UTF-8, a date outside the calendar
            yield from (_tree(batch, at) for at in range(batch.num_rows))


def _tree(batch: Any, at: int) -> dict[str, Any] | Exception:
    try:
        return batch.slice(at, 1).to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return error


def _parquet_file(path: Path) -> Any:
    module = parquet_module()
    try:
        file = module.ParquetFile(path, page_checksum_verification=True, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        sizes = [int(file.metadata.row_group(group).num_rows) for group in range(file.num_row_groups)]
    except _DAMAGE as error:
        raise DataError(f"{path}: not a whole Parquet file ({error})") from error
    if min(sizes, default=0) < 0 or sum(sizes) != file.metadata.num_rows:
        raise DataError(f"{path}: not a whole Parquet file (its row groups are not its {file.metadata.num_rows} rows)")
    return file
