"""JSON from the network: RFC 8259 only, so that whatever was read can be written again.

- No NaN or infinity, no half of a surrogate pair, no number beyond all types, no nesting beyond 200.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from pydantic import ValidationError
from pydantic_core import from_json


def decode(body: bytes) -> Any:
    """The value. Raises ValueError saying what is wrong with it."""
    try:
        value = msgspec.json.decode(body)
        from_json(body)  # bounds the nesting
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from error
    return value


def encode(value: Any) -> bytes:
    """ASCII, without blanks."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def what_is_wrong(error: ValidationError) -> tuple[str, str]:
    """Path and words of the first complaint, without the input, which may be a secret."""
    first, *more = error.errors(include_input=False, include_url=False, include_context=False)
    rest = f" (and {len(more)} more)" if more else ""
    return ".".join(map(str, first["loc"])), first["msg"] + rest
