"""Workers that wait for jobs: as a process `python -m bench.scale.idle RUN WORKERS`, the broker in REDIS_URL.

Each has connections, a lease keeper and a heartbeat of its own, as a worker process has.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from sluice.bench.processes import Fleet
from sluice.bench.queue.mortal import config_of
from sluice.bench.report import say
from sluice.bench.scale.plan import Plan
from sluice.pipeline import logs
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.config.types import Config
from sluice.pipeline.queue import ArqWorker
from sluice.pipeline.status.heartbeat import StatusReporter
from sluice.pipeline.wire.keys import Keys

_RUN = "idle"
_START_S = 60.0
_SETTLE_S = 3.0


async def idle(plan: Plan, client: Any, url: str, home: Path) -> dict[str, float]:
    """Share of one core that the broker uses."""
    async with Fleet("idle", home) as fleet:
        command = [sys.executable, "-m", "bench.scale.idle", _RUN, str(plan.workers)]
        await fleet.start(command, {"REDIS_URL": url}, piped=True)
        await fleet.answers(_START_S)
        await asyncio.sleep(_SETTLE_S)
        before = await broker_s(client)
        await asyncio.sleep(plan.idle_s)
        share = (await broker_s(client) - before) / plan.idle_s
        fleet.check()
    say(f"{plan.workers} idle workers: {share:.4f} of a core in the broker")
    return {"idle_broker_share_100_workers": share, "idle_workers": plan.workers, "idle_s": plan.idle_s}


async def broker_s(client: Any) -> float:
    """Processor seconds that the broker has used so far."""
    facts = await client.info("cpu")
    return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])


async def _serve(config: Config, workers: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tasks = [asyncio.create_task(_worker(config, f"worker-{number}", stop)) for number in range(workers)]
    print("ready", flush=True)
    await asyncio.gather(*tasks)


async def _worker(config: Config, name: str, stop: asyncio.Event) -> None:
    client, keys = connect(config.broker), Keys(config.run)
    beating = asyncio.create_task(StatusReporter(client, keys, "worker", name).run())
    worker = ArqWorker([_nothing], client=client, keys=keys, config=config, name=name, stop=stop, handle_signals=False)
    await worker.main()
    beating.cancel()
    await asyncio.wait({beating})
    await client.aclose()


async def _nothing(_ctx: Any) -> None:
    """What nobody asks for."""


if __name__ == "__main__":
    logs.configure("bench")
    asyncio.run(_serve(config_of(os.environ["REDIS_URL"], sys.argv[1]), int(sys.argv[2])))
