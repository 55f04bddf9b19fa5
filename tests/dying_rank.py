"""`sluice` as one rank of torchrun; when rank 0 gets to a phase, it kills a rank, maybe itself.

torchrun --nproc-per-node 2 -m tests.dying_rank PHASE VICTIM DIRECTORY train -c …
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

PHASES = {
    "read": "sluice.consumers.training.session.Session.take",
    "step": "sluice.consumers.training.step.TrainStep._update",
    "checkpoint": "sluice.consumers.training.learner.save_shards",
    "ack": "sluice.consumers.training.session.Session._ack",
    "publish": "sluice.consumers.training.session.Session._register",
}
"""What rank 0 calls in each; the second call is in the middle of a run."""
BESIDE = {
    "copy": "sluice.consumers.training.learner.ShardsBeside.__init__",
    "write": "sluice.consumers.training.learner.ShardsBeside.wait",
    "acks": "sluice.consumers.training.session.Session._ack_behind",
}
"""The same with `trainer.async_checkpoints`."""
_AT_CALL = 2


def kill_at(phase: str, victim: int, directory: Path) -> None:
    module, _, name = (PHASES | BESIDE)[phase].rpartition(".")
    holder: Any = resolve_name(module)
    real, calls = getattr(holder, name), [0]

    def strike(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == _AT_CALL:
            os.kill(int((directory / str(victim)).read_text()), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(holder, name, strike)


def main() -> None:
    phase, victim, directory, *command = sys.argv[1:]
    rank = os.environ["RANK"]
    Path(directory, rank).write_text(str(os.getpid()))
    if rank == "0":
        kill_at(phase, int(victim), Path(directory))
    from sluice.pipeline.cli.main import main as sluice

    sluice(command)


if __name__ == "__main__":
    main()
