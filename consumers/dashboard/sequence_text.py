"""Text that models, tasks and agents wrote, made fit to be looked at.

- Every control, formatting or unassigned character becomes its escape (`\\x00`, `\\u202e`), so nothing hides, turns
  the line around or breaks the page's encoding. Line breaks and tabs stay, with a sign before them.
- This is not HTML escaping, which the templates do.
"""

from __future__ import annotations

import json
import re
from typing import Any

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u070f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def visible(text: object, limit: int = 0) -> str:
    """One line of text with what hides made visible; `limit` > 0 cuts it and says so."""
    shown = _HIDDEN.sub(_escape, str(text)).replace("\n", "\u23ce").replace("\t", "\u21e5")
    return shown if not limit or len(shown) <= limit else shown[: limit - 1] + "\u2026"


def block(text: object, limit: int = 20_000) -> str:
    """Text of many lines for a <pre>; its line breaks and tabs stay as they are."""
    shown = _HIDDEN.sub(_escape, str(text))
    return shown if len(shown) <= limit else f"{shown[:limit]}\n\u2026 ({len(shown) - limit} more characters)"


def token_text(text: str) -> str:
    """As `block`, with a sign before each line break and tab; a token that completes no character is a middle dot."""
    return _HIDDEN.sub(_escape, text).replace("\n", "\u23ce\n").replace("\t", "\u21e5\t") or "\u00b7"


def pretty(value: Any, limit: int = 20_000) -> str:
    """JSON of anything a message may hold, for a <pre>."""
    try:
        return block(json.dumps(value, indent=2, ensure_ascii=False, default=repr), limit)
    except (TypeError, ValueError):  # keys that JSON does not have
        return block(repr(value), limit)
    except RecursionError:
        return "(nested too deeply to be shown)"


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


FILTERS = {"visible": visible, "block": block, "pretty": pretty}
