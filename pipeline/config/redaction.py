"""What messages show of values that may hold a secret."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

NO_USER = ":***@"
"""In the place of user and password."""

_SECRET = re.compile(r"(?i)pass|pwd|secret|token|credential|auth|signature|key$|^sig$")  # ssl_keyfile is a path
_MOST_CHARS = 60


def is_secret(name: str) -> bool:
    """Whether a value of this name may be one."""
    return _SECRET.search(unquote(name)) is not None


def hide_password(url: str | None) -> str | None:
    """`redis://:secret@host?password=secret` → `redis://:***@host?password=***`."""
    if url is None:
        return None
    scheme, mark, rest = url.partition("://")
    if not mark:
        scheme, rest = "", url
    shown = _query_hidden(rest)
    if "@" in shown:  # also behind a question mark: it is part of a password that nobody escaped
        shown = _query_hidden(NO_USER + shown.rpartition("@")[2])
    return scheme + mark + shown


def shown(value: Any) -> str:
    """The start of a value of whichever key; passwords of URLs are hidden."""
    text = repr(hide_password(value) if isinstance(value, str) and "://" in value else value)
    return f"a {type(value).__name__}" if "://" in text and not isinstance(value, str) else text[:_MOST_CHARS]


def shown_override(item: str) -> str:
    """`--set` with what stands behind it; passwords of URLs are hidden."""
    dotted, sep, text = item.partition("=")
    if not sep or "://" in dotted:  # no key
        return f"--set {hide_password(item) if '://' in item else item!r}"
    return f"--set {dotted}{sep}{hide_password(text) if '://' in text else text}"


def _query_hidden(rest: str) -> str:
    place, asked, query = rest.partition("?")
    pairs = [pair.partition("=") for pair in query.split("&")]
    return place + asked + "&".join(name + sep + ("***" if is_secret(name) else value) for name, sep, value in pairs)
