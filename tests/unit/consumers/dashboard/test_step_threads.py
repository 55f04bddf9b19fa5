"""A step that hangs costs one of its own threads, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from sluice.consumers.dashboard.outcome import MOST, BusyError, StepThreads, runner_of
from sluice.pipeline.config.types import Config


async def test_a_step_that_hangs_keeps_its_place_and_no_other_until_it_ends() -> None:
    threads, go = StepThreads(free_s=0.05, deadline_s=0.05), threading.Event()
    for _ in range(MOST):
        with pytest.raises(TimeoutError):
            await threads.run(go.wait)
    with pytest.raises(BusyError, match="try again later"):
        await threads.run(int)
    assert await asyncio.to_thread(int) == 0, "other pages have their threads"
    go.set()
    threads.free_s = threads.deadline_s = 20
    assert await asyncio.gather(*(threads.run(int) for _ in range(3 * MOST))) == [0] * 3 * MOST


async def test_what_a_step_raises_is_raised_here() -> None:
    threads = StepThreads()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 7) == 7


async def test_all_pages_share_a_runner_and_the_next_configuration_its_threads() -> None:
    state, config, go = SimpleNamespace(), Config(), threading.Event()
    runner = runner_of(state, config)
    runner.steps.free_s = runner.steps.deadline_s = 0.05
    for _ in range(MOST):
        assert runner_of(state, config) is runner
        with pytest.raises(TimeoutError):
            await runner_of(state, config).steps.run(go.wait)
    after = runner_of(state, Config())
    assert after is not runner
    with pytest.raises(BusyError):
        await after.steps.run(int)
    go.set()
