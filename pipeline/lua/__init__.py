"""The scripts that make each hop atomic, one file each. Times come from Redis TIME.

A script whose first line is `-- needs: a b` has the shared functions of a.lua and b.lua in front.
"""

from functools import cache
from pathlib import Path

_NEEDS = "-- needs:"


@cache
def source(name: str) -> str:
    """The text of one script, its shared functions in front."""
    folder = Path(__file__).parent
    text = (folder / f"{name}.lua").read_text()
    first = text.partition("\n")[0]
    needs = first.removeprefix(_NEEDS).split() if first.startswith(_NEEDS) else []
    return "\n".join([*((folder / f"{part}.lua").read_text() for part in needs), text])
