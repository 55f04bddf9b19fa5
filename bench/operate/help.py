"""How long `sluice --help` takes: a new interpreter each time, as a person's shell starts it."""

from __future__ import annotations

import subprocess
import time
from statistics import median

from sluice.pipeline.errors import SluiceError
from sluice.pipeline.run.supervisor import sluice_command

_DEADLINE_S = 60


def help_s(starts: int) -> float:
    """Seconds, the median; the first start warms the file cache and does not count."""
    return median([_once() for _ in range(starts + 1)][1:])


def _once() -> float:
    started = time.monotonic()
    done = subprocess.run(sluice_command("--help"), capture_output=True, timeout=_DEADLINE_S, check=False)
    if done.returncode or b"sluice" not in done.stdout:
        raise SluiceError(
            f"`sluice --help` ended with {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}"
        )
    return time.monotonic() - started
