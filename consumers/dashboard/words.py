"""Numbers, times and ids as a reader wants them; the filters of every template."""

from __future__ import annotations

import re
import time
from urllib.parse import quote

from consumers.dashboard.sequence_text import FILTERS as TEXT_FILTERS
from pipeline.status.text import length

NOTHING = "–"
_BRIEF = 130  # characters


def number(value: float | None, digits: int = 0) -> str:
    """1234567 → 1,234,567."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """A number per second in three figures or so."""
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
    """A length of time."""
    return NOTHING if seconds is None else length(seconds)


def ago(at: float | None) -> str:
    """How long since a Unix time."""
    return NOTHING if not at else f"{length(max(0.0, time.time() - at))} ago"


def when(at: float | None) -> str:
    """A Unix time as 2026-05-04 12:34:56 UTC."""
    return NOTHING if not at else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def clock(at: float | None) -> str:
    """A Unix time as 12:34:56 UTC."""
    return NOTHING if not at else time.strftime("%H:%M:%S UTC", time.gmtime(at))


def url(part: str) -> str:
    """An id as one part of an address, whatever it holds."""
    return quote(part, safe="")


def sentence(text: str) -> list[str]:
    """A sentence of ours, cut where `code` begins and ends: a capital first, unless it begins with a name."""
    if text.partition(" ")[0].isalpha():
        text = text[:1].upper() + text[1:]
    return (text if text.endswith((".", "?", "!")) else text + ".").split("`")


def brief(says: str) -> str:
    """A long sentence without what follows its first semicolon; how long it has been so stays."""
    head, cut, rest = says.partition("; ")
    if not cut or len(says) <= _BRIEF:
        return says
    since = re.search(r" \(for [^)]*\)$", rest)
    return head + (since.group() if since else "")


FILTERS = {
    "number": number, "rate": rate, "figure": figure, "size": size, "span": span, "ago": ago, "when": when,
    "clock": clock, "url": url, "sentence": sentence, "brief": brief,
} | TEXT_FILTERS  # fmt: skip
