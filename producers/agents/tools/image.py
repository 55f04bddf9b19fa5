"""Images that tools return, as parts of the message that the model reads.

    ToolImage (bytes, or a file) ─ format, size ─▶ image part with a data URL ─▶ the trainer, which keeps it by digest

The rollout server keeps no pictures: every call carries them, as in OpenAI's protocol. Its final answer has only their
digests.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from os import PathLike
from typing import Any

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.images.paths import read_anywhere
from sluice.pipeline.images.pixels import check_encoded
from sluice.pipeline.prompts.admission import image_url, is_data_url


@dataclass(frozen=True, slots=True)
class ToolImage:
    """An image in a tool's result: its encoded bytes (PNG, JPEG, …), or the path of its file."""

    data: bytes | None = None
    path: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.data is None) == (self.path is None):
            raise ConfigError("a ToolImage has data or a path; give one of them")

    def part(self, limits: ImagesConfig, where: str) -> dict[str, Any]:
        """The part of a message. Blocks; raises RequestError, which begins with `where`."""
        max_bytes = int(limits.max_mb * 2**20)
        data = self.data if self.data is not None else read_anywhere(str(self.path), max_bytes, where)
        name = check_encoded(data, limits, where)
        encoded = base64.b64encode(data).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/{name.lower()};base64,{encoded}"}}


def with_digests(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with `sha256:…` in place of data URLs."""
    made: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [_with_digest(part) for part in content]}
        made.append(message)
    return made


def _with_digest(part: Any) -> Any:
    url = image_url(part) if isinstance(part, dict) else None
    if not is_data_url(url):
        return part
    try:
        data = binascii.a2b_base64(url.partition(",")[2])
    except ValueError:  # the trainer accepted it, so it stays
        return part
    return {"type": "image_url", "image_url": {"url": f"sha256:{sha256(data).hexdigest()}"}}
