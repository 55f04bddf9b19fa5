"""Rows of Hugging Face `datasets`: a directory made by `save_to_disk`, or `hf:NAME[:CONFIG][:SPLIT]` from the hub.

- Its columns: `messages`, else `prompt` (a string is one user message, after the row's images); `truth`, else `answer`;
  `id`, `images` or `image`, and `metadata` as in JSONL. Other columns aren't read.
- No image is decoded: the stored bytes and paths are the row's.
- Only data are read: `datasets` itself refuses a data set with its own code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from sluice.pipeline.errors import DataError, RequestError, how_to_install
from sluice.pipeline.prompts import rows
from sluice.pipeline.prompts.admission import Limits
from sluice.pipeline.prompts.rows import Malformed, admit_row

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
def _readable(path: str) -> Generator[None]:
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
