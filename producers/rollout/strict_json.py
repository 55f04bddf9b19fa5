"""JSON of the wire with the trainer: read strictly, written as ASCII."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from producers.http.strict_json import decode

__all__ = ["decode", "encode", "what_is_wrong"]


def encode(value: Any) -> bytes:
    """ASCII, without blanks."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def what_is_wrong(error: ValidationError) -> tuple[str, str]:
    """Path and words of the first complaint, without the input, which may be a secret."""
    first, *more = error.errors(include_input=False, include_url=False, include_context=False)
    rest = f" (and {len(more)} more)" if more else ""
    return ".".join(map(str, first["loc"])), first["msg"] + rest
