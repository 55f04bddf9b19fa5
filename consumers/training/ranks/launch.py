"""`trainer.ranks`: `sluice train` starts one process for each rank, with torchrun's own agent, and ends with them.

    sluice train ─▶ LocalElasticAgent ─▶ sluice train (rank 0), sluice train (rank 1), …

- The agent restarts nothing: what started `sluice train` starts it again, and the run continues at its checkpoint.
- The last line says how the rank ended that took the others with it, and what they missed; the exit code is its own.
- A stop is passed on: rank 0 finishes as a single trainer does, and tells the others. Ranks also end with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sluice.pipeline.child_process import tethered
from sluice.pipeline.config.types import Config, FsdpConfig
from sluice.pipeline.errors import ConfigError, DataError, ModelError, RankLost, SluiceError, first_cause
from sluice.pipeline.files import write_atomic

_OF_EVERY_START = (ConfigError.exit_code, DataError.exit_code, ModelError.exit_code)


def wants_ranks(config: Config) -> bool:
    """Whether the configuration asks for a process group, even of one."""
    return max(config.trainer.ranks, config.trainer.tensor_parallel) > 1 or config.trainer.fsdp != FsdpConfig()


def launch(config: Config, command: Sequence[str]) -> None:
    """Run `command` on every rank until all have ended. Raises SluiceError with the cause; exits at a signal."""
    python, *arguments = tethered(list(command))
    with TemporaryDirectory(prefix="sluice-ranks-") as directory:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.trainer.ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(directory),
            shutdown_timeout=max(1, int(config.up.stop_grace_s)),
        )
        try:
            elastic_launch(settings, python)(*arguments)
        except SignalException as stop:
            sys.exit(128 + stop.sigval)
        except ChildFailedError as error:
            raise _Ended(error.failures, config.trainer.ranks) from error


@contextlib.contextmanager
def told_to_launcher(environ: Mapping[str, str] = os.environ) -> Generator[None]:
    """In a rank: an error of the block is what the launcher says in the end."""
    try:
        yield
    except Exception as error:
        if file := environ.get("TORCHELASTIC_ERROR_FILE"):
            said = {"message": str(first_cause(error)), "timestamp": str(int(time.time()))}
            write_atomic(Path(file), json.dumps(said).encode())
        raise


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank already."""
    return "TORCHELASTIC_RUN_ID" in environ


class _Ended(SluiceError):
    """With the exit code of the rank that ended first."""

    def __init__(self, failures: Mapping[int, ProcessFailure], ranks: int) -> None:
        rank, failure = _first(failures)
        lost = [other for other, each in failures.items() if each.exitcode == RankLost.exit_code and other != rank]
        seen = f"; rank {lost[0]}: {failures[lost[0]].message}" if lost else ""
        super().__init__(f"rank {rank} of {ranks} (pid {failure.pid}) {_how(failure)}{seen}")
        self.exit_code = failure.exitcode if failure.exitcode > 0 else RankLost.exit_code


def _first(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Why the group ended: what every start would meet, a kill, an error of a rank's own; else that ranks are lost."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        rank, failure = item
        if failure.exitcode in _OF_EVERY_START:
            return 0, rank
        if failure.exitcode == RankLost.exit_code:
            return 2, rank
        return (3 if failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM) else 1), rank

    return min(failures.items(), key=order)


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode == -signal.SIGKILL:
        return "was killed (SIGKILL): for memory, by somebody, or as it didn't end with the others"
    if failure.exitcode < 0:
        return f"was killed ({signal.Signals(-failure.exitcode).name})"
    return f"ended: {failure.message}"
