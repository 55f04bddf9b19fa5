"""From enqueue to start on an idle queue: one worker process that sleeps, one job at a time, at random moments.

Both ends read the same clock of the same host: before the enqueue call, and first thing in the job.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from sluice.bench.percentile import percentile
from sluice.bench.processes import Fleet
from sluice.bench.queue.plan import Plan
from sluice.bench.queue.systems import Ours
from sluice.bench.report import say
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.queue import Call, JobQueue
from sluice.pipeline.wire.keys import Keys

_RUN = "idle"
_GAP_S = (0.005, 0.045)
_WARM = 5
_SETTLE_S = 0.3


async def idle(plan: Plan, url: str, home: Path) -> dict[str, float]:
    """Milliseconds."""
    ours = Ours(url, _RUN)
    queue, gaps = JobQueue(ours.client, Keys(_RUN)), random.Random(0)
    try:
        async with Fleet("idle", home) as fleet:
            await ours.start(1, fleet)
            fleet.resume()
            for number in range(_WARM + plan.idle_jobs):
                await asyncio.sleep(gaps.uniform(*_GAP_S))
                call = Call(job_id=f"{_RUN}:{number}", function="mark", args=(time.time(),))
                await queue.enqueue_calls([call])
            await asyncio.sleep(_SETTLE_S)
            (totals,) = await ours.totals(fleet)
    finally:
        await ours.close()
    waits_ms = [1000 * wait_s for wait_s in totals.waits_s[_WARM:]]
    if len(waits_ms) != plan.idle_jobs:
        raise SluiceError(f"{len(waits_ms)} of {plan.idle_jobs} idle jobs were started")
    found = {"idle_p50_ms": percentile(waits_ms, 0.5), "idle_p99_ms": percentile(waits_ms, 0.99)}
    say(f"idle: enqueue to start p50 {found['idle_p50_ms']:.2f} ms, p99 {found['idle_p99_ms']:.2f} ms")
    return found
