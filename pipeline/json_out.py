"""The one JSON object that a command with `--json` prints.

- It is one line, has `schema_version`, and is all that the command writes to stdout; what else is said goes to stderr.
- A number that is no number (NaN) is null: JSON has none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from sluice.pipeline.terminal import escaped_json


def json_line(shown: msgspec.Struct | Mapping[str, object], schema_version: int | None = None) -> bytes:
    """The object; `schema_version` is for what has no such field of its own. Raises ValueError without either."""
    head = {} if schema_version is None else {"schema_version": schema_version}
    body = {**head, **msgspec.to_builtins(shown, str_keys=True)}
    if "schema_version" not in body:
        raise ValueError("a JSON object of a command needs a schema_version")
    return msgspec.json.encode(body) + b"\n"


def print_json(shown: msgspec.Struct | Mapping[str, object], schema_version: int | None = None) -> None:
    """Write `json_line` to stdout, at once."""
    sys.stdout.write(escaped_json(json_line(shown, schema_version).decode()))
    sys.stdout.flush()
