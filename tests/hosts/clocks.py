"""Processes whose clocks are apart from the machine's, by Debian's libfaketime."""

from __future__ import annotations

from pathlib import Path

LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
NEEDED = "needs libfaketime (apt install libfaketime)"


def clock(apart: str) -> dict[str, str]:
    """The environment of a process whose clocks are so far apart: `+1h`, `-40s`, `+1d`. Files keep their times."""
    assert LIBRARY is not None, NEEDED
    return {"LD_PRELOAD": str(LIBRARY), "FAKETIME": apart, "FAKETIME_DONT_RESET": "1"}
