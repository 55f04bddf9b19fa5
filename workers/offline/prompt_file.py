"""The prompt rows: read once to count and check them, then again to decode them.

- Nothing is loaded or decoded until the whole file was read once, so a malformed row is found in the first second.
- Standard input is first copied to a temporary file, so it can be read twice.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import DataError
from sluice.pipeline.images.store import admit_bytes, admit_images
from sluice.pipeline.prompts.admission import Limits
from sluice.pipeline.prompts.rows import (
    ImageRow,
    Malformed,
    RowImage,
    check_images,
    check_messages,
    is_dataset,
    is_parquet,
    read_dataset,
    read_rows,
)
from sluice.pipeline.wire.messages import ImageRef
from sluice.workers.engine.plugins.base import RequestType
from sluice.workers.engine.requests import GenerationRequest, TextGenerationRequest, VlmGenerationRequest
from sluice.workers.offline.answers import MAX_ROWS
from sluice.workers.offline.settings import STANDARD


class PromptRow(ImageRow, frozen=True, kw_only=True):
    """One prompt: exactly one of `messages`, `prompt` (a user message) and `prompt_token_ids` (used unchanged).

    Its images are those of any row; beside `prompt` they come before the text.
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    id: str | int | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("messages", "prompt", "prompt_token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of `messages`, `prompt` and `prompt_token_ids`, got {what}")
        if self.messages is not None:
            check_messages(self.messages)
            check_images(self.messages, len(self.each_image()))
        if not getattr(self, given[0]):
            raise ValueError(f"`{given[0]}` is empty")
        if self.images and self.prompt_token_ids is not None:
            raise ValueError("`images` need `messages` or `prompt`, not `prompt_token_ids`")

    def request(self, where: str, folder: Path, *, anywhere: bool = True) -> GenerationRequest:
        """The row as an engine request; `where` names the row in errors.

        `anywhere`: plain paths are files wherever they are, from the folder on; else they are references as well.
        """
        if self.prompt_token_ids is not None:
            return TextGenerationRequest(prompt_token_ids=self.prompt_token_ids, request_id=where)
        if not self.images:
            messages = self.messages or [{"role": "user", "content": self.prompt}]
            return TextGenerationRequest(messages=messages, request_id=where)
        content = [*({"type": "image"} for _ in self.each_image()), {"type": "text", "text": self.prompt}]
        return VlmGenerationRequest(
            messages=self.messages or [{"role": "user", "content": content}],
            images=tuple(_given(image, folder, anywhere) for image in self.each_image()),
            request_id=where,
        )


def _given(image: str | RowImage, folder: Path, anywhere: bool) -> bytes | Path | ImageRef:
    if isinstance(image, RowImage) and image.data is not None:
        return image.data
    ref = ImageRef.of(image) if isinstance(image, str) else image.ref
    is_file = ref.path and not ref.url and not ref.sha256
    return folder / str(ref.path) if anywhere and is_file else ref


@dataclass(frozen=True)
class Scan:
    """Results of the first pass."""

    digest: str  # of every row as it was read
    total: int  # rows, including malformed ones
    malformed: dict[int, Malformed] = field(default_factory=dict)  # by row
    with_image: set[int] = field(default_factory=set)  # rows with images

    @property
    def request_types(self) -> list[RequestType]:
        """The request types of the well-formed rows."""
        has_text = self.total > len(self.malformed) + len(self.with_image)
        kinds: list[tuple[RequestType, bool]] = [("text", has_text), ("vlm", bool(self.with_image))]
        return [kind for kind, found in kinds if found]


@dataclass(frozen=True)
class PromptFile:
    """`name` is its name in messages."""

    path: Path
    name: str
    folder: Path  # image paths are relative to it
    kind: Literal["jsonl", "parquet", "datasets"] = "jsonl"
    images: ImagesConfig = field(default_factory=ImagesConfig)

    def scan(self) -> Scan:
        """Read every row once. Raises DataError."""
        malformed, with_image, total = dict[int, Malformed](), set[int](), 0
        digest, encode = sha256(), msgspec.msgpack.Encoder().encode
        for number, row in self.rows():
            total = number + 1
            if isinstance(row, Malformed):
                malformed[number] = row
                digest.update(encode(ascii(row.problem)))  # its place names the file, which may be moved
                continue
            if row.images:
                with_image.add(number)
            digest.update(encode(row))
        if total > MAX_ROWS:
            raise DataError(f"{self.name}: {total} rows; the limit is {MAX_ROWS}, so split the file")
        return Scan(digest.hexdigest(), total, malformed, with_image)

    def rows(self) -> Iterator[tuple[int, PromptRow | Malformed]]:
        """(number from 0, row) in file order."""
        limits = Limits(images=self.images.max_per_prompt)
        if self.kind == "datasets":
            return enumerate(read_dataset(self.name, PromptRow, limits, self._check))
        options: dict[str, Any] = {"name": self.name, "limits": limits, "check": self._check}
        return enumerate(read_rows(self.path, PromptRow, parquet=self.kind == "parquet", **options))

    def _check(self, row: PromptRow) -> None:
        admit_images(row.each_image(), self.images, "`images`")
        admit_bytes(row.each_image(), self.images)


@contextmanager
def open_prompts(source: str, images: ImagesConfig | None = None) -> Iterator[PromptFile]:
    """The prompts of a file, a data set or standard input (JSONL); `images` has the limits. Raises DataError."""
    images = images or ImagesConfig()
    if source != STANDARD:
        path = Path(source)
        if is_dataset(source):
            yield PromptFile(path, source, path if path.is_dir() else Path(), "datasets", images)
            return
        if not path.is_file():
            raise DataError(
                f"{path}: no such file; --in must name a JSONL or Parquet file, a saved data set or hf:NAME, or be -"
            )
        yield PromptFile(path, source, path.parent, "parquet" if is_parquet(path) else "jsonl", images)
        return
    with tempfile.NamedTemporaryFile(prefix="sluice-prompts-") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield PromptFile(Path(copy.name), "<stdin>", Path(), images=images)
