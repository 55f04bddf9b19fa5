"""From a version's publication to the first token under it: this process publishes, a decode worker serves a queue.

The broker is real, and so are the version directories; the worker is in the midst of its sequences each time, and the
gaps between versions are random, so that every phase of its loop is met.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from statistics import median
from typing import Any

from redis.asyncio import Redis

from sluice.bench.engine.model import CONTEXT
from sluice.bench.proximal.engines import Engine
from sluice.bench.proximal.plan import Sizes
from sluice.bench.proximal.publisher import Publisher
from sluice.bench.proximal.rows import PROMPT_IDS
from sluice.bench.proximal.versions import Variants
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import BrokerError, SluiceError
from sluice.pipeline.queue import Credit, JobQueue
from sluice.pipeline.wire.keys import Keys, tagged
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams
from sluice.pipeline.wire.tokens import TokenArray

_AMPLE = Credit(max_in_flight=10**9, samples_per_version=10**9, max_staleness=1)
_GAP_S = (0.3, 1.0)
_JOBS_A_ROW = 16  # far more than are decoded meanwhile


async def published(
    engine: Engine, url: str, run: str, settings: list[str], variants: Variants, sizes: Sizes, home: Path
) -> dict[str, Any]:
    """The fields of one backend."""
    client = connect(BrokerConfig(url=url))
    try:
        keys = Keys(run)
        await _enqueue(client, keys, sizes)
        async with engine.serving(settings) as version:
            publisher = Publisher(client, keys, home / run / "weights", variants, sizes.retention)
            await publisher.owner.confirm()
            return await _measure(engine, publisher, version, sizes)
    finally:
        await client.aclose()


async def _measure(engine: Engine, publisher: Publisher, version: int, sizes: Sizes) -> dict[str, Any]:
    chance = random.Random(0)
    whole: list[float] = []
    registered: list[float] = []
    sequences: list[int] = []
    for number in range(sizes.publishes + 1):
        version += 1
        now = await publisher.publish(version)
        seen = await engine.seen()
        if seen.version != version:
            raise SluiceError(f"the worker decodes under v{seen.version} after v{version} was published")
        if number:  # the first one met a worker that had just begun
            whole.append(seen.at - now.published_at)
            registered.append(seen.at - now.registered_at)
            sequences.append(seen.sequences)
        await asyncio.sleep(chance.uniform(*_GAP_S))
    return {
        "median": median(whole),
        "worst": max(whole),
        "from_register": {"median": median(registered), "worst": max(registered)},
        "publishes": len(whole),
        "fewest_sequences": min(sequences),
    }


async def _enqueue(client: Redis, keys: Keys, sizes: Sizes) -> None:
    """Greedy sequences of a third to all of the context."""
    chance = random.Random(1)
    longest = CONTEXT - sizes.prompt
    jobs = [
        DecodeJob(
            run=keys.run,
            job_id=tagged(keys.run, str(number)),
            prompt_token_ids=TokenArray(chance.randrange(PROMPT_IDS) for _ in range(sizes.prompt)),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=chance.randint(longest // 3, longest)),
        )
        for number in range(sizes.rows * _JOBS_A_ROW)
    ]
    outcomes = await JobQueue(client, keys).enqueue(jobs, _AMPLE)
    if set(outcomes) != {"enqueued"}:
        raise BrokerError(f"the bench's jobs were not admitted: {sorted(set(outcomes))}")
