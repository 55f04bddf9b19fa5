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
from hashlib import file_digest
from pathlib import Path
from typing import Any

import msgspec

from sluice.pipeline.errors import DataError
from sluice.pipeline.prompts.rows import Malformed, check_messages, is_parquet, read_rows
from sluice.pipeline.wire.messages import ImageRef
from sluice.workers.engine.plugins.base import RequestType
from sluice.workers.engine.requests import GenerationRequest, TextGenerationRequest, VlmGenerationRequest
from sluice.workers.offline.answers import MAX_ROWS
from sluice.workers.offline.settings import STANDARD


class PromptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: exactly one of `messages`, `prompt` (a user message) and `prompt_token_ids` (used unchanged)."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    images: tuple[str | ImageRef, ...] = ()  # paths, relative to the input file's folder; beside `prompt`, before it
    id: str | int | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        given = [name for name in ("messages", "prompt", "prompt_token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of `messages`, `prompt` and `prompt_token_ids`, got {what}")
        if self.messages is not None:
            check_messages(self.messages)
        if not getattr(self, given[0]):
            raise ValueError(f"`{given[0]}` is empty")
        if self.images and self.prompt_token_ids is not None:
            raise ValueError("`images` need `messages` or `prompt`, not `prompt_token_ids`")
        for image in self.images:
            reference = ImageRef.of(image) if isinstance(image, str) else image
            if reference.path is None or reference.url or reference.sha256:
                raise ValueError("`images` must be paths here; URLs and digests are only for jobs on the queue")

    def request(self, where: str, folder: Path) -> GenerationRequest:
        """The row as an engine request; `where` names the row in errors."""
        if self.prompt_token_ids is not None:
            return TextGenerationRequest(prompt_token_ids=self.prompt_token_ids, request_id=where)
        if not self.images:
            messages = self.messages or [{"role": "user", "content": self.prompt}]
            return TextGenerationRequest(messages=messages, request_id=where)
        content = [*({"type": "image"} for _ in self.images), {"type": "text", "text": self.prompt}]
        return VlmGenerationRequest(
            messages=self.messages or [{"role": "user", "content": content}],
            images=tuple(folder / (image if isinstance(image, str) else str(image.path)) for image in self.images),
            request_id=where,
        )


@dataclass(frozen=True)
class Scan:
    """Results of the first pass."""

    digest: str  # sha256 of the file
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
    parquet: bool

    def scan(self) -> Scan:
        """Read every row once. Raises DataError."""
        malformed, with_image, total = dict[int, Malformed](), set[int](), 0
        for number, row in self.rows():
            total = number + 1
            if isinstance(row, Malformed):
                malformed[number] = row
            elif row.images:
                with_image.add(number)
        if total > MAX_ROWS:
            raise DataError(f"{self.name}: {total} rows; the limit is {MAX_ROWS}, so split the file")
        with self.path.open("rb") as stream:
            return Scan(file_digest(stream, "sha256").hexdigest(), total, malformed, with_image)

    def rows(self) -> Iterator[tuple[int, PromptRow | Malformed]]:
        """(number from 0, row) in file order."""
        return enumerate(read_rows(self.path, PromptRow, parquet=self.parquet, name=self.name))


@contextmanager
def open_prompts(source: str) -> Iterator[PromptFile]:
    """The prompts of a path, or of standard input (JSONL). Raises DataError."""
    if source != STANDARD:
        path = Path(source)
        if not path.is_file():
            raise DataError(f"{path}: no such file; --in must name a JSONL or Parquet file, or be -")
        yield PromptFile(path, source, path.parent, is_parquet(path))
        return
    with tempfile.NamedTemporaryFile(prefix="sluice-prompts-") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield PromptFile(Path(copy.name), "<stdin>", Path(), parquet=False)
