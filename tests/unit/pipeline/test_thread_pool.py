"""Work beside the event loop: its failures, and its hanging, are its caller's alone."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from sluice.pipeline import thread_pool
from sluice.pipeline.errors import DeadlineExceeded, EngineError, RequestError
from sluice.pipeline.thread_pool import CoroutineThread, ThreadPool, _Loop, lost_threads
from tests.deadlines import HANG_S, RUN_S
from tests.roles import eventually


def panic() -> None:
    """What a tokenizer does whose pattern gives up on a long run: a Rust panic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")  # type: ignore[assignment]
    tokenizer.encode("a" * 64)


async def test_a_panic_is_an_ordinary_failure() -> None:
    pool = ThreadPool("render", 1)
    with pytest.raises(RequestError, match="PanicException"):
        await pool.run(panic, timeout_s=HANG_S, what="the prompt")
    assert await pool.run(lambda: 7, timeout_s=60, what="the next one") == 7
    pool.close()


async def test_an_exit_and_an_error_reach_the_caller() -> None:
    pool = ThreadPool("render", 1)

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(RequestError, match="SystemExit"):
        await pool.run(leave, timeout_s=60, what="it")
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 / 0, timeout_s=60, what="it")
    pool.close()


async def test_what_waits_behind_the_last_thread_is_told_that_it_is_lost() -> None:
    pool, gate = ThreadPool("render", 1, max_lost=1), threading.Event()
    hangs = asyncio.create_task(pool.run(gate.wait, timeout_s=0.02, what="the first"))
    await asyncio.sleep(0)
    async with asyncio.timeout(HANG_S):
        with pytest.raises(EngineError, match="too many calls of render never ended"):
            await pool.run(lambda: 7, timeout_s=HANG_S, what="the second")
        with pytest.raises(DeadlineExceeded):
            await hangs
    gate.set()
    pool.close()


@pytest.mark.parametrize("timeout_s", [0.02, 60.0])
async def test_what_nobody_waits_for_any_more_is_handed_over(timeout_s: float) -> None:
    """Its caller ran out of time, or left."""
    pool, begun, gate = ThreadPool("make", 1), threading.Event(), threading.Event()
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def make() -> int:
        begun.set()
        gate.wait()
        return 7

    making = asyncio.create_task(pool.run(make, timeout_s=timeout_s, what="it", unwanted=found.set_result))
    async with asyncio.timeout(HANG_S):
        while not begun.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.01)
        if timeout_s > 1:
            making.cancel()
        with contextlib.suppress(asyncio.CancelledError, DeadlineExceeded):
            await making
        gate.set()
        assert await found == 7
        assert await pool.run(lambda: 8, timeout_s=60, what="it", unwanted=found.set_result) == 8
    pool.close()


async def test_what_hangs_is_counted_bounded_and_replaced() -> None:
    pool, gate = ThreadPool("render", 1, max_lost=2), threading.Event()
    for number in (1, 2):
        with pytest.raises(DeadlineExceeded, match="the prompt"):
            await pool.run(gate.wait, timeout_s=0.02, what="the prompt")
        assert pool.lost == number
    with pytest.raises(EngineError, match="2 earlier calls"):
        await pool.run(lambda: 7, timeout_s=60, what="one more")
    gate.set()
    async with asyncio.timeout(HANG_S):
        while pool.lost:  # noqa: ASYNC110 - the threads end by themselves
            await asyncio.sleep(0.001)
    assert await pool.run(lambda: 7, timeout_s=60, what="it") == 7
    pool.close()


async def test_the_clock_starts_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, gate, now_s = ThreadPool("render", 1), threading.Event(), 0.0
    monkeypatch.setattr(thread_pool, "time", SimpleNamespace(monotonic=lambda: now_s))
    first = asyncio.create_task(pool.run(gate.wait, timeout_s=HANG_S, what="the first"))
    second = asyncio.create_task(pool.run(lambda: 7, timeout_s=0.05, what="the second"))
    await asyncio.sleep(0)
    now_s = 1000.0  # and it stands still while the second one works
    await asyncio.sleep(0.2)  # it looks at the clock several times
    gate.set()
    assert await second == 7
    assert await first
    pool.close()


async def test_callers_that_leave_make_no_more_threads() -> None:
    pool, begun, gate = ThreadPool("render", 2), threading.Barrier(3), threading.Event()

    def work() -> None:
        begun.wait(HANG_S)
        gate.wait()

    calls = [asyncio.create_task(pool.run(work, timeout_s=120, what="it")) for _ in range(40)]
    await asyncio.to_thread(begun.wait, HANG_S)  # a thread that has begun nothing when its callers leave would be idle
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (pool.lost, pool.busy) == (0, 2)
    gate.set()
    assert await pool.run(lambda: 7, timeout_s=60, what="the next one") == 7
    pool.close()


async def test_what_a_caller_left_behind_loses_its_place_at_its_deadline() -> None:
    pool, begun, gate = ThreadPool("render", 1), threading.Event(), threading.Event()
    first = asyncio.create_task(pool.run(lambda: begun.set() or gate.wait(), timeout_s=0.2, what="the first"))
    assert await asyncio.to_thread(begun.wait, HANG_S)
    first.cancel()
    assert await pool.run(lambda: 7, timeout_s=60, what="the second") == 7
    assert pool.lost == 1
    gate.set()
    pool.close()


async def test_a_search_without_a_hit_is_an_ordinary_failure() -> None:
    pool = ThreadPool("tool", 1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pool.run(lambda: next(iter(())), timeout_s=60, what="it")
    pool.close()


async def test_several_at_once() -> None:
    pool, together = ThreadPool("render", 3), threading.Barrier(3)
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(pool.run(together.wait, timeout_s=60, what="it") for _ in range(3)))
    pool.close()


async def test_no_call_waits_for_a_running_one_while_a_thread_could_be_started() -> None:
    """However a thread is interrupted between taking a call and beginning it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(4000):
            pool, together = ThreadPool("render", 2), threading.Barrier(2)
            await pool.run(lambda: None, timeout_s=60, what="what leaves an idle thread")
            await asyncio.gather(
                *(pool.run(partial(together.wait, HANG_S), timeout_s=RUN_S, what="it") for _ in range(2))
            )
            pool.close()
    finally:
        sys.setswitchinterval(interval)


async def test_lost_threads_are_counted_over_all_pools_of_the_process() -> None:
    before, gate = lost_threads(), threading.Event()
    pools = [ThreadPool("render", 1), ThreadPool("tool", 1)]
    for pool in pools:
        with pytest.raises(DeadlineExceeded):
            await pool.run(gate.wait, timeout_s=0.02, what="the prompt")
    assert lost_threads() == before + 2
    gate.set()
    async with asyncio.timeout(HANG_S):
        while lost_threads() > before:  # noqa: ASYNC110 - the threads end by themselves
            await asyncio.sleep(0.001)


async def test_a_pool_that_was_closed_finishes_what_waits() -> None:
    pool, gate = ThreadPool("render", 1), threading.Event()
    calls = [asyncio.create_task(pool.run(gate.wait, timeout_s=60, what="it")) for _ in range(3)]
    while not pool.busy:  # noqa: ASYNC110 - a thread begins by itself
        await asyncio.sleep(0.001)
    pool.close()
    gate.set()
    assert await asyncio.gather(*calls) == [True, True, True]


async def test_coroutines_share_one_loop_that_is_not_the_asking_one() -> None:
    home = CoroutineThread("judge")

    async def where() -> int:
        return id(asyncio.get_running_loop())

    places = {await home.run(where, timeout_s=60, what="it") for _ in range(3)}
    assert len(places) == 1
    assert places != {id(asyncio.get_running_loop())}
    home.close()


async def test_a_coroutine_is_cancelled_at_its_deadline_and_its_neighbour_ends() -> None:
    home, told = CoroutineThread("judge", grace_s=HANG_S), threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(RUN_S)
        finally:
            told.set()

    async def short() -> int:
        return 7

    with pytest.raises(DeadlineExceeded, match=r"the first did not end within 0\.02 s"):
        await home.run(waits, timeout_s=0.02, what="the first")
    assert told.is_set()
    assert await home.run(short, timeout_s=60, what="the second") == 7
    home.close()


async def test_a_coroutine_that_blocks_its_loop_is_alone_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    home, gate, begun = CoroutineThread("judge", grace_s=0.05), threading.Event(), 0
    has_begun, is_blocked, here = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    answers = _Loop.answers

    async def once_blocked(loop: _Loop, within_s: float) -> bool:
        await is_blocked.wait()  # its thread may be late
        return await answers(loop, within_s)

    async def neighbour() -> str:
        nonlocal begun
        begun += 1
        here.call_soon_threadsafe(has_begun.set)
        await asyncio.sleep(0.01 if begun > 1 else RUN_S)  # the first time it is still there when the loop is blocked
        return "done"

    async def blocks() -> None:
        here.call_soon_threadsafe(is_blocked.set)
        gate.wait()

    monkeypatch.setattr(_Loop, "answers", once_blocked)
    before = lost_threads()
    first = asyncio.create_task(home.run(neighbour, timeout_s=HANG_S, what="the neighbour"))
    await has_begun.wait()
    with pytest.raises(DeadlineExceeded, match=r"it blocked its event loop for more than 0\.05 s"):
        await home.run(blocks, timeout_s=0.05, what="it")
    assert await asyncio.wait_for(first, HANG_S) == "done"
    assert (begun, home.lost, lost_threads() - before) == (2, 1, 1)
    gate.set()

    async def is_free() -> bool:
        return home.lost == 0

    await eventually(is_free, "the loop to end")
    home.close()


async def test_a_coroutine_that_ignores_its_end_costs_no_other_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    home, gate = CoroutineThread("judge", grace_s=0.05), threading.Event()
    answers = _Loop.answers
    monkeypatch.setattr(_Loop, "answers", lambda loop, _: answers(loop, HANG_S))  # its thread may be late

    async def stays() -> None:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def short() -> int:
        return 7

    with pytest.raises(DeadlineExceeded):
        await home.run(stays, timeout_s=0.02, what="it")
    assert await home.run(short, timeout_s=60, what="the second") == 7
    assert home.lost == 0
    gate.set()
    home.close()


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
async def test_an_exit_of_a_coroutine_is_its_callers_failure(error: BaseException) -> None:
    home = CoroutineThread("judge")

    async def leaves() -> None:
        raise error

    async def short() -> int:
        return 7

    with pytest.raises(RequestError, match=type(error).__name__):
        await home.run(leaves, timeout_s=60, what="it")
    assert await home.run(short, timeout_s=60, what="the second") == 7
    home.close()
