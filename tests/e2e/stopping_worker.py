"""`sluice worker` that stops itself (SIGSTOP) in the middle of a sequence: no stall of a test misses that moment.

python -m tests.e2e.stopping_worker REPORT worker -c …

REPORT: at which report of progress, one every `worker.checkpoint_tokens` of a sequence that goes on; from 1.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any

from sluice.pipeline.cli.main import main as sluice
from sluice.workers.engine.running import RunningSequence


def stop_at(number: int) -> None:
    """Until SIGCONT, once."""
    holder: Any = RunningSequence
    real, numbers = holder._report, itertools.count(1)

    def report(sequence: RunningSequence) -> None:
        real(sequence)
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGSTOP)

    holder._report = report


if __name__ == "__main__":
    stop_at(int(sys.argv[1]))
    sluice(sys.argv[2:])
