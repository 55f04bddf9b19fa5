"""How the chaos tests hit processes: always at a moment that is known to have come."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.deadlines import RUN_S
from tests.e2e.processes import Process
from tests.e2e.stack import Stack

NO_JOBS = "jobs (none is ready)"  # what an idle worker waits for
PATIENT = {"max_attempts": 100}  # deaths that these tests cause are not the jobs' fault


def chaos_seed() -> int:
    """A new seed each time; it is printed, and SLUICE_CHAOS_SEED repeats it."""
    seed = int(os.environ.get("SLUICE_CHAOS_SEED") or uuid.uuid4().int % 10_000)
    print(f"SLUICE_CHAOS_SEED={seed}")
    return seed


def seeded() -> random.Random:
    """A random source with that seed."""
    return random.Random(chaos_seed())


def stop_while_it_holds_jobs(stack: Stack, worker: Process) -> set[str]:
    """SIGSTOP a worker at a moment when it holds leases; returns the jobs it holds.

    It may not know yet that it holds them: the broker's answer to its claim can be on the way.
    """
    return _stop_while(stack, worker, stack.leased)


def stop_while_it_decodes(stack: Stack, worker: Process) -> set[str]:
    """SIGSTOP a worker amid jobs in their first attempt, of which it has stored progress; returns these jobs.

    It needs `worker.checkpoint_tokens` of a few tokens.
    """
    return _stop_while(stack, worker, lambda: _begun(stack))


def _stop_while(stack: Stack, worker: Process, holders: Callable[[], dict[str, str]]) -> set[str]:
    until = time.monotonic() + RUN_S
    while True:
        assert time.monotonic() < until, f"{worker.name} was never seen with jobs\n{stack.report(stack.snapshot())}"
        if worker.name in holders().values():
            stop(worker)
            stack.leased()  # what it had sent before is done: the broker reads every connection before its next answer
            held = {job_id for job_id, name in holders().items() if name == worker.name}
            if held:
                return held
            worker.signal(signal.SIGCONT)
        time.sleep(0.01)


def _begun(stack: Stack) -> dict[str, str]:
    """The leased jobs in their first attempt that have stored progress, and their workers."""
    leased = stack.leased()
    with stack.client() as client:
        raw: Any = client
        states = {job_id: raw.hmget(stack.keys.job_state + job_id, "attempt", "p") for job_id in leased}
    return {job_id: leased[job_id] for job_id, (attempt, progress) in states.items() if attempt == b"1" and progress}


def stop(process: Process) -> None:
    """SIGSTOP; returns once it does nothing any more."""
    until = time.monotonic() + RUN_S
    process.signal(signal.SIGSTOP)
    while not is_stopped(process.popen.pid):
        assert time.monotonic() < until, f"{process.name} did not stop"
        time.sleep(0.001)


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    try:
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
    except OSError:  # a thread ended while we looked
        return False


def resume(process: Process) -> None:
    """SIGCONT."""
    process.signal(signal.SIGCONT)
