"""One worker process that may be killed: `python -m bench.queue.mortal RUN`, the broker in REDIS_URL, until SIGTERM.

Its heartbeat says whose leases end with it, as a decode worker's does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from sluice.bench.queue.worker import broker_config
from sluice.pipeline.config.types import Config
from sluice.pipeline.queue import ArqWorker
from sluice.pipeline.run.role import default_name, role_process

MAX_JOBS = 64  # all of a round's jobs: one worker may hold every one of them


async def last(_ctx: Any, seconds: float) -> None:
    """Take that long."""
    await asyncio.sleep(seconds)


def config_of(url: str, run: str) -> Config:
    """Of this process and of its supervisor."""
    return Config(run=run, broker=broker_config(url))


async def serve(config: Config) -> None:
    """Until SIGTERM."""
    async with role_process(config, "worker", default_name("worker")) as role:
        worker = ArqWorker(
            [last], client=role.client, keys=role.keys, config=config, name=role.name, stop=role.stop,
            max_jobs=MAX_JOBS, handle_signals=False,
        )  # fmt: skip
        role.status.fact(owner=worker.leases.queue.owner)
        await role.status.beat()
        await worker.main()
        await worker.close()


if __name__ == "__main__":
    asyncio.run(serve(config_of(os.environ["REDIS_URL"], sys.argv[1])))
