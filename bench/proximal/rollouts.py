"""Results of a run whose weights change while it decodes: what a queue of several versions holds.

- Under each version a wave of sequences begins, of evenly spread lengths; the next version comes when the longest of
  them has half of its tokens. So each version leaves sequences that ended under it, and others that went on.
- The engine is held in that sequence's report until the load has been asked for: how fast it is decides nothing.
- Requests and results are those that a decode worker makes of jobs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from sluice.bench.proximal.plan import Sizes
from sluice.bench.proximal.rows import PROMPT_IDS
from sluice.pipeline.errors import DeadlineExceeded
from sluice.pipeline.queue import Claim
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams, SequenceResult
from sluice.pipeline.wire.tokens import TokenArray
from sluice.workers.decode_worker import request_for, result_of
from sluice.workers.engine.contracts import Backend, SequenceSoFar
from sluice.workers.job_prompts import JobPrompt

_SHORTEST = 8  # tokens
_WAIT_S = 120.0

Publish = Callable[[int], Awaitable[Path]]
"""Version -> its directory, once it is registered."""


async def rollouts(backend: Backend, publish: Publish, versions: int, sizes: Sizes) -> list[SequenceResult]:
    """All results, of versions 0 .. `versions` - 1."""
    results: list[asyncio.Task[SequenceResult]] = []
    await backend.load_weights(await publish(0), 0)
    for version in range(versions):
        lengths = _lengths(sizes.wave, sizes.wave_longest)
        results += [
            asyncio.create_task(_decode(backend, f"{version}-{number}", length))
            for number, length in enumerate(lengths[:-1])
        ]
        turn = _Turn(backend, publish, version + 1, lengths[-1] // 2) if version + 1 < versions else None
        leader = asyncio.create_task(_decode(backend, f"{version}-last", lengths[-1], turn))
        results.append(leader)
        if turn is not None:
            await turn.loaded(leader)
    return list(await asyncio.wait_for(asyncio.gather(*results), _WAIT_S))


class _Turn:
    """Loads a version once the sequence that leads has so many tokens."""

    def __init__(self, backend: Backend, publish: Publish, version: int, at: int) -> None:
        self._backend, self._publish, self._version, self._at = backend, publish, version, at
        self._loop = asyncio.get_running_loop()
        self._load: asyncio.Future[asyncio.Task[None]] = self._loop.create_future()

    def saw(self, so_far: SequenceSoFar) -> None:
        """In the engine's thread, one token at a time."""
        if so_far.offset + len(so_far.token_ids) == self._at:
            asyncio.run_coroutine_threadsafe(self._ask(), self._loop).result(_WAIT_S)

    async def loaded(self, leader: asyncio.Task[SequenceResult]) -> None:
        """Return when the version serves; raises what went wrong on the way."""
        done, _ = await asyncio.wait({self._load, leader}, timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise DeadlineExceeded(f"waited {_WAIT_S:.0f} s for a sequence to have {self._at} tokens")
        if not self._load.done():
            leader.result()
            raise DeadlineExceeded(f"a sequence ended before it had {self._at} tokens")
        await self._load.result()

    async def _ask(self) -> None:
        directory = await self._publish(self._version)
        self._load.set_result(asyncio.create_task(self._backend.load_weights(directory, self._version)))
        await asyncio.sleep(0)  # it is in the engine's hands then


def _lengths(count: int, longest: int) -> list[int]:
    """Rising."""
    return [_SHORTEST + index * (longest - _SHORTEST) // max(1, count - 1) for index in range(count)]


async def _decode(backend: Backend, name: str, num_new_tokens: int, turn: _Turn | None = None) -> SequenceResult:
    chance = random.Random(name)
    prompt = [chance.randrange(PROMPT_IDS) for _ in range(chance.randint(8, 48))]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=num_new_tokens)
    job = DecodeJob(
        run="bench", job_id=f"bench:{name}", prompt_token_ids=TokenArray(prompt), sampling=sampling,
        task="exact_answer", truth="yes",
    )  # fmt: skip
    claim = Claim(job_id=job.job_id, attempt=1, enqueued_at=time.time(), job=job)
    request = request_for(claim, job, JobPrompt(prompt), 0, seed=0, every=0, on_progress=lambda *_: None)
    if turn is not None:
        request = replace(request, report_every=1, report=turn.saw)
    output = await backend.decode(request)
    return result_of(claim, job, request, output, facts=backend.facts, worker="bench-worker")
