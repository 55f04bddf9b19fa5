"""The deadline of vLLM's start, over plain processes: what stands still is ended, what moves is not."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest

pytest.importorskip("psutil")

from sluice.workers.engine.vllm.startup import StartWatch
from tests.deadlines import HANG_S


def wait_for_a_lock(lock: threading.Lock, wakes_s: float | None) -> None:
    """Wakes up for nothing every `wakes_s`, as timers of libraries do."""
    while not lock.acquire(timeout=-1 if wakes_s is None else wakes_s):
        sum(range(1000))


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
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


def test_a_child_that_computes_or_was_there_before_is_left_alone() -> None:
    lock = threading.Lock()
    with lock:
        old = multiprocessing.get_context("fork").Process(target=wait_for_a_lock, args=(lock, None))
        old.start()
        with StartWatch(limit_s=1.0) as watch:
            child = multiprocessing.get_context("fork").Process(target=compute, args=(3.0,))
            child.start()
            child.join(HANG_S)
        assert watch.stalled is None
        assert child.exitcode == 0
        assert old.is_alive()
        old.kill()
        old.join()
