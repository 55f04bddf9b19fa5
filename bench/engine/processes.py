"""The sides' processes, from the parent: started one by one, asked one at a time, the others stopped meanwhile.

- Start-up seconds run from the start of the process to its first decoded token, imports included.
- While one side decodes, the processes of the others are paused (SIGSTOP).
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType

import msgspec

from sluice.bench.engine.load import asks
from sluice.bench.engine.plan import Plan
from sluice.bench.engine.stats import Sample
from sluice.bench.processes import Fleet
from sluice.bench.report import say

_START_S = 300.0
_ROUND_S = 1800.0


class SideProcesses:
    """One process for each side of the plan, for the length of an `async with` block."""

    def __init__(self, plan: Plan, logs: Path) -> None:
        self._plan, self._logs = plan, logs
        self._fleets: dict[str, Fleet] = {}
        self._scope = contextlib.AsyncExitStack()
        self.startup_s: dict[str, float] = {}

    async def __aenter__(self) -> SideProcesses:
        try:
            for side in self._plan.sides:
                await self._start(side)
        except BaseException:
            await self._scope.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._scope.aclose()

    async def round(self, side: str, number: int, count: int) -> Sample:
        """Let one side decode the sequences of a round. Raises SluiceError when it failed."""
        fleet = self._fleets[side]
        (process,) = fleet.processes
        fleet.resume()
        assert process.stdin is not None
        process.stdin.write(f"{number} {count} {self._plan.longest}\n".encode())
        (line,) = await fleet.answers(_ROUND_S)
        fleet.pause()
        sample = msgspec.json.decode(line, type=Sample)
        sample.check(side, asks(number, count, longest=self._plan.longest))
        return sample

    async def _start(self, side: str) -> None:
        fleet = await self._scope.enter_async_context(Fleet(side, self._logs))
        arguments = [side, str(self._plan.model), str(self._plan.threads), str(max(self._plan.rounds))]
        started = time.perf_counter()
        await fleet.start(
            [sys.executable, "-m", "sluice.bench.engine.child", *arguments],
            _environment(self._plan.threads),
            piped=True,
        )
        await fleet.answers(_START_S)
        self.startup_s[side] = time.perf_counter() - started
        fleet.pause()
        self._fleets[side] = fleet
        say(f"{side} started in {self.startup_s[side]:.1f} s")


def _environment(threads: int) -> dict[str, str]:
    """The same for every side; only vLLM reads its own."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
