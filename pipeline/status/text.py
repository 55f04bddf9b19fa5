"""Numbers and lengths of time in words, for every view."""

from __future__ import annotations


def length(seconds: float) -> str:
    """A length of time, short."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


def waiting(number: int, one: str, many: str = "") -> str:
    """So many of them wait; empty where there are none."""
    return f"{counted(number, one, many)} {'waits' if number == 1 else 'wait'}" if number else ""


def counted(number: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
