"""What a worker holds: a bounded number of sequences, the unstarted ones free to go back."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import deque

from sluice.pipeline.queue import Claim
from sluice.workers.job_prompts import JobPrompt
from sluice.workers.slots import HeldJob, Slots
from tests.deadlines import HANG_S
from tests.factories import decode_job


def held_job(name: str, n: int = 1, attempt: int = 1) -> HeldJob:
    job = decode_job(f"r:{name}", n=n)
    return HeldJob(
        Claim(job_id=job.job_id, attempt=attempt, enqueued_at=0.0, job=job), job, JobPrompt([1]), deque(range(n))
    )


def start(held: HeldJob, index: int) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(asyncio.sleep(60))


async def test_the_engine_is_filled_and_the_rest_waits_and_goes_back_unstarted() -> None:
    jobs = Slots(max_batch=8)
    for number in range(jobs.capacity):
        jobs.add(held_job(str(number)))
    jobs.fill(start)
    assert (jobs.running, jobs.full(), jobs.room()) == (jobs.engine_limit, True, 0)
    back = jobs.take_back(started=False)
    assert len(back) == jobs.capacity - jobs.engine_limit
    assert all(not held.started for held in back)
    assert len(jobs.take_back(started=True)) == jobs.engine_limit
    assert not jobs.held()


async def test_a_job_is_gone_with_its_last_sequence() -> None:
    jobs, held = Slots(max_batch=4), held_job("a", n=2)
    jobs.add(held)
    jobs.fill(start)
    first, second = list(held.tasks)
    assert not jobs.end(held, first)
    assert jobs.end(held, second)
    assert (jobs.running, bool(jobs.held())) == (0, False)


async def never() -> JobPrompt:
    await asyncio.sleep(HANG_S)
    raise AssertionError


async def test_jobs_that_overtake_one_without_its_prompt_leave_nothing_behind() -> None:
    jobs, slow = Slots(max_batch=4), held_job("slow")
    slow.prompt = asyncio.create_task(never())
    jobs.add(slow)
    ended = list[weakref.ref[HeldJob]]()
    for number in range(20):
        held = held_job(str(number))
        ended.append(weakref.ref(held))
        jobs.add(held)
        jobs.fill(start)
        [task] = held.tasks
        task.cancel()
        assert jobs.end(held, task)
        del held
    gc.collect()
    assert not any(each() for each in ended)
    assert jobs.held() == {"r:slow"}
    assert jobs.lose("r:slow")


async def test_only_the_named_attempt_is_lost_and_its_tasks_are_cancelled() -> None:
    jobs, held = Slots(max_batch=4), held_job("a", attempt=2)
    jobs.add(held)
    jobs.fill(start)
    assert not jobs.lose("r:a", attempt=1)
    [task] = held.tasks
    assert jobs.lose("r:a", attempt=2)
    await asyncio.wait([task], timeout=HANG_S)
    assert task.cancelled()


async def test_a_job_that_waits_for_its_image_takes_no_row_and_lets_others_pass() -> None:
    fetched = asyncio.Event()

    async def fetch() -> JobPrompt:
        await fetched.wait()
        return JobPrompt([1])

    jobs = Slots(max_batch=8)
    pending = held_job("image", n=9)
    pending.prompt = asyncio.get_running_loop().create_task(fetch())
    jobs.add(pending)
    jobs.add(held_job("text", n=2))
    jobs.fill(start)
    assert (jobs.running, jobs.full(), jobs.fetching()) == (2, False, 1)
    fetched.set()
    await pending.prompt
    jobs.fill(start)
    assert (jobs.running, jobs.fetching()) == (9, 0)
    for held in jobs.take_back(started=True):
        await asyncio.gather(*held.tasks, return_exceptions=True)


async def test_a_job_that_waits_for_its_image_can_be_put_back() -> None:
    jobs = Slots(max_batch=8)
    pending = held_job("image")
    pending.prompt = asyncio.get_running_loop().create_task(asyncio.sleep(60, JobPrompt([1])))
    jobs.add(pending)
    assert jobs.take_back(started=False) == [pending]
    await asyncio.gather(pending.prompt, return_exceptions=True)
    assert pending.prompt.cancelled()
