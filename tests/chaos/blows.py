"""How the chaos tests hit processes: always at a moment that is known to have come."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.deadlines import RUN_S
from tests.e2e.processes import Process, marked
from tests.e2e.stack import Stack

NO_JOBS = "jobs (none is ready)"  # what an idle worker waits for
PATIENT = {"max_attempts": 100}  # deaths that these tests cause are not the jobs' fault
MANY = 10_000  # rows: no run is over before `end_rows`, however late its test comes to the blow


def chaos_seed() -> int:
    """A new seed each time; it is printed, and SLUICE_CHAOS_SEED repeats it."""
    seed = int(os.environ.get("SLUICE_CHAOS_SEED") or uuid.uuid4().int % 10_000)
    print(f"SLUICE_CHAOS_SEED={seed}")
    return seed


def seeded() -> random.Random:
    """A random source with that seed."""
    return random.Random(chaos_seed())


def stop_while_it_holds_jobs(stack: Stack, worker: Process, least: int = 1) -> set[str]:
    """SIGSTOP a worker at a moment when it holds leases, so many at least; returns the jobs it holds.

    It may not know yet that it holds them: the broker's answer to its claim can be on the way.
    """
    return _stop_while(stack, worker, stack.leased, least)


def stop_while_it_decodes(stack: Stack, worker: Process) -> set[str]:
    """SIGSTOP a worker amid jobs in their first attempt, of which it has stored progress; returns these jobs.

    It needs `worker.checkpoint_tokens` of a few tokens.
    """
    return _stop_while(stack, worker, lambda: _begun(stack))


def _stop_while(stack: Stack, worker: Process, holders: Callable[[], dict[str, str]], least: int = 1) -> set[str]:
    until = time.monotonic() + RUN_S
    while True:
        assert time.monotonic() < until, f"{worker.name} was never seen with jobs\n{stack.report(stack.snapshot())}"
        if worker.name in holders().values():
            stop(worker)
            stack.leased()  # what it had sent before is done: the broker reads every connection before its next answer
            held = {job_id for job_id, name in holders().items() if name == worker.name}
            if len(held) >= least:
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


def pids_of(stack: Stack, command: str) -> list[int]:
    """The processes of a run that play a role, by its command; waits until there is one."""
    word, until = f" {command} ", time.monotonic() + RUN_S
    while not (pids := [pid for pid, line in marked(stack.mark).items() if word in line]):
        assert time.monotonic() < until, f"no process of {command} is alive\n{stack.report(stack.snapshot())}"
        time.sleep(0.05)
    return pids


def newest_row(stack: Stack) -> int:
    """The number, from 0, of the newest row whose job was enqueued; -1 before the first."""
    with stack.client() as client:
        raw: Any = client
        cursor = raw.hget(stack.keys.source, "cursor")
    return int(cursor.partition(b":")[2]) if cursor else -1


def end_rows(stack: Stack) -> None:
    """Let a run over MANY rows come to its end, shortly after the newest that was enqueued.

    Its producer is killed, and the next one reads the shorter file.
    """
    until = time.monotonic() + RUN_S
    while True:
        pids = pids_of(stack, "produce")
        send(pids, signal.SIGSTOP)
        if all(map(is_stopped, pids)) and set(pids_of(stack, "produce")) == set(pids):
            break  # else a supervisor may start one on the old file
        assert time.monotonic() < until, stack.report(stack.snapshot())
        time.sleep(0.01)
    cut_rows(stack)
    send(pids, signal.SIGKILL)
    own = [process for process in stack.processes if process.popen.pid in pids]
    for process in own:
        process.kill()
    if own:  # else its supervisor does
        stack.start("produce")


def cut_rows(stack: Stack) -> None:
    """Shorten the file of a run that has no producer now: it keeps all rows that were enqueued, and few more."""
    most = newest_row(stack) + 1 + stack.config.producer.max_in_flight  # a killed one's last call may be on its way
    trained = set(stack.trained())  # a killed broker may have lost that they were enqueued
    last = max((at for at, row in enumerate(stack.rows) if stack.expected([row]) & trained), default=0)
    stack.rows = stack.rows[: max(most, last + 1)]
    stack.data.write_text("".join(json.dumps(row) + "\n" for row in stack.rows))


def send(pids: list[int], number: int) -> None:
    """A signal to each that has not ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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
