"""The deadline of vLLM's start, over plain processes: what stands still is ended with its stack, what moves is not."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from sluice.workers.engine.vllm.startup import StartWatch


def wait_for_a_lock(lock: threading.Lock) -> None:
    with lock:
        pass


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def test_a_fork_that_waits_for_an_inherited_lock_is_ended_and_its_stack_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()
    with lock, StartWatch(tmp_path, limit_s=1.0) as watch:
        child = multiprocessing.get_context("fork").Process(target=wait_for_a_lock, args=(lock,))
        child.start()
        child.join(30)
    assert child.exitcode == -9
    assert watch.stalled is not None
    assert "made no progress for 1 s" in watch.stalled
    assert "wait_for_a_lock" in watch.stalled


def test_a_child_that_computes_or_was_there_before_is_left_alone(tmp_path: Path) -> None:
    lock = threading.Lock()
    with lock:
        old = multiprocessing.get_context("fork").Process(target=wait_for_a_lock, args=(lock,))
        old.start()
        with StartWatch(tmp_path, limit_s=1.0) as watch:
            child = multiprocessing.get_context("fork").Process(target=compute, args=(3.0,))
            child.start()
            child.join(30)
        assert watch.stalled is None
        assert child.exitcode == 0
        assert old.is_alive()
        old.kill()
        old.join()
