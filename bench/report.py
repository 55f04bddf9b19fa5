"""How every benchmark speaks: readable lines on stderr; the result on stdout, with `--json` as one JSON object."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1


def say(line: str) -> None:
    """One readable line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def finish(result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result: a line per value, or one JSON object; `schema_version` and the machine's load are added."""
    full = {"schema_version": SCHEMA_VERSION, **_rounded(result), **_machine()}
    if as_json:
        print(json.dumps(full), flush=True)
        return
    for name, value in full.items():
        print(f"{name:24} {json.dumps(value) if isinstance(value, list | dict) else value}", flush=True)


def _machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers: cores, and the load average of the last minute."""
    return {"cpus": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}


def _rounded(value: Any) -> Any:
    """Floats with 5 significant digits, everywhere inside."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
