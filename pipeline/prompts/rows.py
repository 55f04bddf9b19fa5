"""Rows of JSONL or Parquet files, or of a Hugging Face data set, as typed structs.

- Rows come in file order, one at a time. An unusable row is a `Malformed` with file and line; the others are still
  read.
- A damaged row group of a Parquet file costs only its own rows; each becomes a `Malformed`.
- A column without a value (null) is as good as absent. `image` is another name of `images`.
- Blank lines aren't rows but count as lines; a byte order mark isn't part of the first row.

A data set is a directory made by `save_to_disk`, or `hf:NAME[:CONFIG][:SPLIT]` from the hub:

- Its columns: `messages`, else `prompt` (a string is one user message, after the row's images); `truth`, else `answer`;
  `id`, `images` or `image`, and `metadata` as in JSONL. Other columns aren't read.
- No image is decoded: the stored bytes and paths are the row's.
- Only data are read: `datasets` itself refuses a data set with its own code.
"""

from __future__ import annotations

import codecs
import importlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
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


HUB = "hf:"
_COLUMNS = ("messages", "prompt", "truth", "answer", "id", "images", "image", "metadata")
_ENDS = 64  # rows the fingerprint reads at each end


def is_dataset(path: str) -> bool:
    """Whether the path looks like a data set."""
    return path.startswith(HUB) or any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def count_dataset(path: str) -> int:
    """Rows, including malformed ones."""
    return len(_open_dataset(path))


def fingerprint_dataset(path: str) -> str:
    """Identity of the contents: number of rows, columns, and the rows at the beginning and end.

    It reads no others, so a row that was changed between them leaves it as it is.
    """
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
def _readable(path: str) -> Generator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # Arrow and the image decoders raise many kinds of errors
        raise DataError(f"{path}: a row cannot be read with datasets ({error!r}); rebuild the data set") from error


def _mapped(columns: dict[str, Any]) -> dict[str, Any]:
    tree = given_columns(columns)
    prompt, answer = tree.pop("prompt", None), tree.pop("answer", None)
    if prompt is not None:
        asked = [{"role": "user", "content": _shown(prompt, tree)}] if isinstance(prompt, str) else prompt
        tree.setdefault("messages", asked)
    if answer is not None:
        tree.setdefault("truth", answer)
    return tree


def _shown(prompt: str, columns: dict[str, Any]) -> Any:
    """What the user says: the row's images, then the prompt."""
    images: Any = columns.get("images", [])
    if not (count := len(cast("list[Any]", images)) if isinstance(images, list) else 1):
        return prompt
    return [*[{"type": "image"}] * count, {"type": "text", "text": prompt}]


def _open_dataset(path: str) -> Any:
    module = _datasets()
    try:
        data = _from_hub(module, path) if path.startswith(HUB) else module.load_from_disk(path)
    except (OSError, ValueError, RuntimeError, module.exceptions.DatasetsError) as error:
        raise DataError(f"{path}: cannot be read with datasets ({error}); {_USE}") from error
    if isinstance(data, dict):
        names = list(cast("dict[str, Any]", data))
        raise DataError(f"{path}: holds the splits {', '.join(names)}; name one: {path.rstrip('/')}/{names[0]}")
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
        return {name: _short(inner) for name, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_short(inner) for inner in cast("list[Any]", value)]
    return sha256(value).digest() if isinstance(value, bytes) else value


def _plain(row: Any) -> dict[str, Any]:
    """The columns of a row, whatever the format."""
    return cast("dict[str, Any]", row) if isinstance(row, dict) else row.to_pylist()[0]


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
        raise DataError(f"data sets need Hugging Face datasets: {how_to_install('data')}, or give JSONL") from error
