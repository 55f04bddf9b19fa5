"""The deadline of vLLM's start, over plain processes: what stands still is ended, what moves is not."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("psutil")

import psutil

from sluice.workers.engine.vllm import startup
from sluice.workers.engine.vllm.startup import StartWatch
from tests.deadlines import HANG_S


def wait_for_a_lock(lock: threading.Lock, wakes_s: float | None) -> None:
    """Wakes up for nothing every `wakes_s`, as timers of libraries do."""
    while not lock.acquire(timeout=-1 if wakes_s is None else wakes_s):
        sum(range(1000))


@pytest.mark.parametrize("wakes_s", [None, 0.1])
def test_a_process_that_waits_for_a_lock_is_ended(wakes_s: float | None) -> None:
    lock = threading.Lock()
    with lock, StartWatch(limit_s=2.0) as watch:
        child = multiprocessing.get_context("fork").Process(target=wait_for_a_lock, args=(lock, wakes_s))
        child.start()
        child.join(HANG_S)
    assert child.exitcode == -9
    assert watch.stalled == "its core made no progress for 2 s at startup"


def test_a_child_that_moves_or_was_there_before_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, found = threading.Semaphore(0), startup._descendants
    work_s = 0.0

    def look() -> Iterator[psutil.Process]:
        nonlocal work_s
        work_s += 1.0
        looks.release()
        return found()

    def many_looks() -> bool:
        return all(looks.acquire(timeout=HANG_S) for _ in range(20))

    monkeypatch.setattr(startup, "_LOOK_S", 0.01)
    monkeypatch.setattr(startup, "_descendants", look)
    # Of the child, more at each look.
    monkeypatch.setattr(startup, "_work", lambda process: 0.0 if process.pid == old.pid else work_s)
    lock = threading.Lock()
    old, child = (
        multiprocessing.get_context("fork").Process(target=wait_for_a_lock, args=(lock, None)) for _ in range(2)
    )
    with lock:
        old.start()
        with StartWatch(limit_s=0.02) as watch:
            assert many_looks()
            child.start()
            assert many_looks()
        assert watch.stalled is None
        for process in (old, child):
            assert process.is_alive()
            process.kill()
            process.join()


def test_the_work_of_a_process_grows_as_it_computes() -> None:
    process, until = psutil.Process(), time.monotonic() + HANG_S
    before = startup._work(process)
    while startup._work(process) < before + 0.05:
        assert time.monotonic() < until
        sum(range(100_000))
