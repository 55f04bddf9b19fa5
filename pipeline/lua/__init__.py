"""The scripts that make each hop atomic, one file each. Times come from Redis TIME."""

from functools import cache
from pathlib import Path

_OWNED = ("own", "read", "handoff", "ack", "publish")
_PRELUDE = {**dict.fromkeys(("claim", "commit", "fail"), "bury"), **dict.fromkeys(_OWNED, "owns")}


@cache
def source(name: str) -> str:
    """The text of one script, its shared functions in front."""
    folder = Path(__file__).parent
    parts = [_PRELUDE[name], name] if name in _PRELUDE else [name]
    return "\n".join((folder / f"{part}.lua").read_text() for part in parts)
