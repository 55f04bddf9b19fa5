"""How much memory this process holds."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int | None:
    """Of this process alone; None where the system does not say (no /proc)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
