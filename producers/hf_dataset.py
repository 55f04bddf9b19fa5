"""Rows of Hugging Face `datasets`: a directory that `save_to_disk` made, or `hf:NAME[:CONFIG][:SPLIT]` from the hub.

- Columns: `messages`, else `prompt` (a text is one user message); `truth`, else `answer`; `id`, `images` and
  `metadata` as in JSONL. Others are not read.
- Only data are read: a data set that brings code of its own is refused by `datasets` itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline.errors import DataError
from pipeline.prompts.admission import Limits
from pipeline.prompts.rows import Malformed, admit_row

HUB = "hf:"
_COLUMNS = ("messages", "prompt", "truth", "answer", "id", "images", "metadata")
_ENDS = 64  # rows at either end that the fingerprint reads
_RowT = TypeVar("_RowT")


def is_dataset(path: str) -> bool:
    """By its look."""
    return path.startswith(HUB) or any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def count_rows(path: str) -> int:
    """Rows, malformed ones included."""
    return len(_open(path))


def fingerprint(path: str) -> str:
    """Identity of the contents: the number of rows, their columns, and the rows at the beginning and the end."""
    data = _open(path)
    ends = [*range(min(_ENDS, len(data))), *range(max(_ENDS, len(data) - _ENDS), len(data))]
    with _readable(path):
        rows = repr([data[at] for at in ends])
    return sha256(f"{len(data)}:{data.features}:{rows}".encode("utf-8", "backslashreplace")).hexdigest()[:24]


def read_rows(path: str, kind: type[_RowT], limits: Limits | None = None) -> Iterator[_RowT | Malformed]:
    """The rows in their order; raises DataError where the file or an image in it is broken."""
    for number, columns in enumerate(_rows(path), start=1):
        try:
            row = msgspec.convert(_mapped(columns), kind)
            admit_row(row, limits or Limits())
            yield row
        except (msgspec.ValidationError, ValueError) as error:
            yield Malformed(f"{path}: row {number}", f"malformed row: {error}")


def _rows(path: str) -> Iterator[dict[str, Any]]:
    with _readable(path):
        yield from _open(path)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # Arrow and the decoders of images have errors of many kinds
        raise DataError(f"{path}: a row cannot be read with datasets ({error!r}); make the data set anew") from error


def _mapped(columns: dict[str, Any]) -> dict[str, Any]:
    tree = {name: value for name, value in columns.items() if value is not None}
    prompt, answer = tree.pop("prompt", None), tree.pop("answer", None)
    if prompt is not None:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        tree.setdefault("messages", asked)
    if answer is not None:
        tree.setdefault("truth", answer)
    return tree


def _open(path: str) -> Any:
    module = _module()
    try:
        data = _from_hub(module, path) if path.startswith(HUB) else module.load_from_disk(path)
    except (OSError, ValueError, RuntimeError, module.exceptions.DatasetsError) as error:
        raise DataError(f"{path}: cannot be read with datasets ({error}); {_USE}") from error
    if isinstance(data, dict):
        raise DataError(f"{path}: holds the splits {', '.join(data)}; name one: {path.rstrip('/')}/{next(iter(data))}")
    kept = [name for name in _COLUMNS if name in data.column_names]
    if not {"messages", "prompt"} & set(kept):
        raise DataError(f"{path}: has neither `messages` nor `prompt`, but {', '.join(data.column_names)}; rename one")
    return data.select_columns(kept)


_USE = "give a directory made by save_to_disk, or hf:NAME[:CONFIG][:SPLIT] where the hub can be reached"


def _from_hub(module: Any, path: str) -> Any:
    name, *rest = path.removeprefix(HUB).split(":")
    split = rest.pop() if rest else "train"
    if not name or len(rest) > 1:
        raise DataError(f"{path}: not the name of a data set; write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    return module.load_dataset(name, *rest, split=split)


def _module() -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise DataError("data sets need Hugging Face datasets: pip install 'sluice[data]', or give JSONL") from error
