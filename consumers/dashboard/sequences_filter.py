"""What a list's address asks for, and the address of what is asked for. Pure.

- Values are cut, never trusted; one that cannot be read is left out, and said.
- The address of a filter holds only what is set, so that it can be shared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlencode

import msgspec

from consumers.history.records import SequenceFilter

MOST_CHARS = 300
MOST_CURSOR = 4000
_TEXTS = ("search", "state", "finish_reason", "worker", "task", "job_id")
_VERSION_DIGITS = 12
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def read_filter(asked: Mapping[str, str]) -> tuple[SequenceFilter, str]:
    """The filter, and what of it could not be read ("" if all was)."""
    texts = {name: clean(asked.get(name, "")) for name in _TEXTS}
    version, triggered = asked.get("version", "").strip(), asked.get("triggered", "")
    problem = ""
    if version and not (version.isascii() and version.isdecimal() and len(version) <= _VERSION_DIGITS):
        problem, version = "A weight version is a whole number; the filter goes without it.", ""
    wanted = SequenceFilter(
        **texts,
        version=int(version) if version else None,
        triggered={"yes": True, "no": False}.get(triggered),
    )
    return wanted, problem


def clean(text: str) -> str:
    """Without control characters, which no id may have, and not too long."""
    return _CONTROL.sub("", text).strip()[:MOST_CHARS].strip()


def address(wanted: SequenceFilter, before: str = "") -> str:
    """`/sequences?state=dead&…`."""
    triggered = {True: "yes", False: "no", None: ""}[wanted.triggered]
    fields = msgspec.structs.asdict(wanted) | {"triggered": triggered, "before": before}
    query = urlencode({name: value for name, value in fields.items() if value not in ("", None)}, errors="replace")
    return f"/sequences?{query}" if query else "/sequences"


def count_set(wanted: SequenceFilter) -> int:
    """How many conditions it has."""
    return sum(value not in ("", None) for value in msgspec.structs.asdict(wanted).values())
