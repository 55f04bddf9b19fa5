"""The scripts that make each hop atomic, one file each. Times come from Redis TIME."""

from functools import cache
from pathlib import Path

_PRELUDE = {"claim": ("bury",), "commit": ("bury",), "fail": ("bury",)}


@cache
def source(name: str) -> str:
    """The text of one script, its shared functions in front."""
    folder = Path(__file__).parent
    return "\n".join((folder / f"{part}.lua").read_text() for part in (*_PRELUDE.get(name, ()), name))
