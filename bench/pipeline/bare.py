"""The engine alone: W processes, each with its share of a round's jobs; no Redis.

As a process (`python -m sluice.bench.pipeline.bare WORKER WORKERS DIGITS SET…`) it loads its engine, then for every
line `NAME COUNT LONGEST` on stdin prepares the jobs and answers `ready`, and for the line `go` decodes them and answers
with their tokens. Rendering the prompts lies outside the clock here, and inside it on the queue's side.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from sluice.bench.pipeline.load import jobs, request_of, share
from sluice.bench.pipeline.plan import Plan
from sluice.bench.pipeline.stats import Sample
from sluice.bench.processes import Fleet
from sluice.pipeline.config import Config, load_config
from sluice.workers.engine.contracts import Backend, SequenceRequest

_DEADLINE_S = 600.0


class BareEngines:
    """The parent's side."""

    def __init__(self, plan: Plan, fleet: Fleet) -> None:
        self._plan, self._fleet = plan, fleet

    async def start(self) -> None:
        """Start the processes; they load while other things happen."""
        for worker in range(self._plan.workers):
            arguments = [str(worker), str(self._plan.workers), str(int(self._plan.digits)), *self._plan.overrides()]
            await self._fleet.start([sys.executable, "-m", "sluice.bench.pipeline.bare", *arguments], piped=True)

    async def round(self, name: str, count: int, longest: int) -> Sample:
        """Decode the jobs of a round; the clock runs from `go` to the last answer."""
        await self._ask(f"{name} {count} {longest}\n")
        started, cpu_s = time.monotonic(), self._fleet.cpu_s()
        answers = await self._ask("go\n")
        seconds, cpu_s = time.monotonic() - started, self._fleet.cpu_s() - cpu_s
        tokens: dict[str, list[int]] = {}
        for answer in answers:
            tokens |= msgspec.json.decode(answer, type=dict[str, list[int]])
        return Sample(seconds, cpu_s, tokens)

    async def _ask(self, line: str) -> list[bytes]:
        """One answer of each process."""
        for process in self._fleet.processes:
            assert process.stdin is not None
            process.stdin.write(line.encode())
        return await self._fleet.answers(_DEADLINE_S)


async def _serve(config: Config, worker: int, workers: int, digits: bool) -> None:
    """The child's side."""
    from sluice.workers.engine.backends import make_backend
    from sluice.workers.job_prompts import JobPrompts

    backend = make_backend(config.model, config.worker)
    await backend.start()
    prompts = JobPrompts(config.model)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, count, longest = line.split()
        mine = share(jobs(name, int(count), digits=digits, longest=int(longest)), worker, workers)
        requests = [request_of(job, prompts.text(job, backend.facts).token_ids, config.seed) for job in mine]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(msgspec.json.encode(await _decode(backend, requests)).decode(), flush=True)
    await prompts.close()
    await backend.close()


async def _decode(backend: Backend, requests: list[SequenceRequest]) -> dict[str, list[int]]:
    outputs = await asyncio.gather(*map(backend.decode, requests))
    return {output.seq_key: output.token_ids for output in outputs}


if __name__ == "__main__":
    _worker, _workers, _digits, *_settings = sys.argv[1:]
    asyncio.run(_serve(load_config(None, _settings, {}), int(_worker), int(_workers), bool(int(_digits))))
