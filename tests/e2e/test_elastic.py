"""Real workers that an autoscaler starts and ends all the time, over a wave of load: nothing is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.pipeline.broker import connection
from sluice.pipeline.queue import Credit, JobQueue, job_id_for
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.processes import Process
from tests.e2e.stack import Stack
from tests.keda import Autoscaler

WORKERS = Path(__file__).parents[2] / "deploy/kubernetes/components/scaling/worker.yaml"
WAVE = (6, 60)  # jobs; the second comes once the first has no worker any more
FASTER = 60.0  # than the manifest's times
GRACE_S = 1.0  # from SIGTERM to SIGKILL; a sequence takes longer
PLENTY = Credit(max_in_flight=1000, samples_per_version=1000, max_staleness=1)


class Deployment:
    """Keeps as many workers as it is told: the newest ends first, by SIGTERM, and by SIGKILL after the grace."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.up: list[Process] = []
        self._ending: list[tuple[Process, float]] = []
        self.killed = self.started = self.most = 0

    def scale(self, replicas: int) -> None:
        now = time.monotonic()
        for _ in range(replicas - len(self.up)):
            self.up.append(self._stack.start("worker"))
            self.started += 1
        while len(self.up) > replicas:
            ending = self.up.pop()
            ending.expendable = True
            ending.signal(signal.SIGTERM)
            self._ending.append((ending, now + GRACE_S))
        self.most = max(self.most, len(self.up))
        for process, until in list(self._ending):
            if process.popen.poll() is None and now >= until:
                process.kill()
                self.killed += 1
            if process.popen.poll() is not None:
                self._ending.remove((process, until))


def test_a_wave_of_load_loses_nothing(make_stack: MakeStack) -> None:
    worker = {"max_batch": 4, "lease_s": 2, "drain_s": 5, "max_attempts": 100}
    stack = make_stack(text_rows(1), "exact_answer", worker=worker)
    scaler = Autoscaler.of(WORKERS, faster=FASTER, threshold=16.0, most=3, down_percent=50)
    deployment, sent = Deployment(stack), list[str]()
    for jobs in WAVE:
        sent += enqueue(stack, len(sent), jobs)
        follow(stack, scaler, deployment)
    arrived = Counter(result.group_id for result in stack.results())
    assert arrived == Counter(sent), stack.report(stack.snapshot())
    assert deployment.most == scaler.most
    assert deployment.started > scaler.most, "none came again after there were none"
    assert stack.snapshot().queued_jobs == 0


def follow(stack: Stack, scaler: Autoscaler, deployment: Deployment) -> None:
    """Until there is no job and no worker."""
    until = time.monotonic() + RUN_S
    with stack.client() as client:
        raw: Any = client
        while (jobs := raw.zcard(stack.keys.jobs)) or deployment.up:
            assert time.monotonic() < until, f"{jobs} jobs are left\n{stack.report(stack.snapshot())}"
            broken = [process.tail() for process in deployment.up if process.failed]
            assert not broken, broken
            deployment.scale(scaler.decide(time.monotonic(), jobs, len(deployment.up)))
            time.sleep(10 / FASTER)


def enqueue(stack: Stack, first: int, count: int) -> list[str]:
    """Ids of new jobs, whose sequences end at their limit."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=150)
    jobs = [job(stack, str(number), sampling) for number in range(first, first + count)]

    async def put() -> Sequence[str]:
        client = connection.connect(stack.broker_config)
        try:
            return await JobQueue(client, stack.keys).enqueue(jobs, PLENTY)
        finally:
            await client.aclose()

    assert set(asyncio.run(put())) == {"enqueued"}
    return [each.job_id for each in jobs]


def job(stack: Stack, name: str, sampling: SamplingParams) -> DecodeJob:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"say {name}"}]
    job_id = job_id_for(stack.run, name, 0, sampling, 1)
    return DecodeJob(
        run=stack.run, job_id=job_id, n=1, sampling=sampling, task="exact_answer", messages=messages, truth="a"
    )
