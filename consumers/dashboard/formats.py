"""Template filters: numbers, times and ids for readers, and untrusted text made visible.

- Every control, formatting or unassigned character becomes its escape (`\\x00`, `\\u202e`), so nothing can hide,
  reverse the line or break the page's encoding. Line breaks and tabs stay, with a symbol before them.
- This isn't HTML escaping; the templates do that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from sluice.pipeline.status.text import length

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u070f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
NOTHING = "–"
_BRIEF = 130  # characters


def visible(text: object, limit: int = 0) -> str:
    """One line of text with invisible characters escaped; `limit` > 0 truncates it and says so."""
    shown = _HIDDEN.sub(_escape, str(text)).replace("\n", "\u23ce").replace("\t", "\u21e5")
    return shown if not limit or len(shown) <= limit else shown[: limit - 1] + "\u2026"


def block(text: object, limit: int = 20_000) -> str:
    """Multi-line text for a <pre>; its line breaks and tabs are kept."""
    shown = _HIDDEN.sub(_escape, str(text))
    return shown if len(shown) <= limit else f"{shown[:limit]}\n\u2026 ({len(shown) - limit} more characters)"


def token_text(text: str) -> str:
    """Like `block`, with a symbol before line breaks and tabs; a token with no complete character is a middle dot."""
    return _HIDDEN.sub(_escape, text).replace("\n", "\u23ce\n").replace("\t", "\u21e5\t") or "\u00b7"


def pretty(value: Any, limit: int = 20_000) -> str:
    """JSON of any message content, for a <pre>."""
    try:
        return block(json.dumps(value, indent=2, ensure_ascii=False, default=repr), limit)
    except (TypeError, ValueError):  # keys that JSON doesn't have
        return block(repr(value), limit)
    except RecursionError:
        return "(nested too deeply to be shown)"


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


TEXT_FILTERS = {"visible": visible, "block": block, "pretty": pretty}


def number(value: float | None, digits: int = 0) -> str:
    """1234567 → 1,234,567."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """A number per second with about three figures."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def figure(value: float) -> str:
    """A metric, short: 0.0123, 12.3, 1,234, 1.2e-05."""
    size = abs(value)
    if value % 1 == 0 and size < 1e15:
        return f"{int(value):,}"
    if 1000 <= size < 1e15:
        return f"{value:,.0f}"
    return f"{value:.1e}" if size < 1e-3 else f"{value:.4g}"


def size(num_bytes: float | None) -> str:
    """12.3 MiB."""
    if num_bytes is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def span(seconds: float | None) -> str:
    """A duration."""
    if seconds is None:
        return NOTHING
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
    return length(seconds)


def ago(at: float | None) -> str:
    """Time since a Unix time."""
    return NOTHING if not at else f"{length(max(0.0, time.time() - at))} ago"


def when(at: float | None) -> str:
    """A Unix time as 2026-05-04 12:34:56 UTC."""
    return NOTHING if not at else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def clock(at: float | None) -> str:
    """A Unix time as 12:34:56 UTC."""
    return NOTHING if not at else time.strftime("%H:%M:%S UTC", time.gmtime(at))


def url(part: str) -> str:
    """An id as one URL path segment, whatever it contains."""
    return quote(part, safe="")


def query(fields: Mapping[str, object]) -> str:
    """The query string of an address: the fields that are set, so the address can be shared."""
    return urlencode({name: value for name, value in fields.items() if value not in ("", None)}, errors="replace")


def sentence(text: str) -> list[str]:
    """Our own sentence, split where `code` begins and ends: capitalised, unless it begins with a name."""
    if text.partition(" ")[0].isalpha():
        text = text[:1].upper() + text[1:]
    return (text if text.endswith((".", "?", "!")) else text + ".").split("`")


FILTERS = {
    "number": number, "rate": rate, "figure": figure, "size": size, "span": span, "ago": ago, "when": when,
    "clock": clock, "url": url, "sentence": sentence,
} | TEXT_FILTERS  # fmt: skip
