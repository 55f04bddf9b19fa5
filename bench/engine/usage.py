"""What a side used of the machine: this process and those it started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def peak_mb() -> float:
    """Most memory held: on CUDA the allocator's peak, else the sum of peak resident sizes; MB of 10^6 bytes."""
    import torch

    if torch.cuda.is_available() and (used := torch.cuda.max_memory_allocated()):
        return used / 1e6
    return sum(map(_kilobytes, _read("status"))) * 1024 / 1e6


def cpu_s() -> float:
    """Processor seconds so far (user and system); 0 where there is no /proc."""
    fields = [stat.rpartition(")")[2].split() for stat in _read("stat")]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _read(name: str) -> Iterator[str]:
    """The file of this name of each process."""
    waiting = ["self"]
    while waiting:
        process = Path("/proc", waiting.pop())
        with contextlib.suppress(OSError):  # ended meanwhile
            yield (process / name).read_text()
            for children in process.glob("task/*/children"):
                waiting += children.read_text().split()


def _kilobytes(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
