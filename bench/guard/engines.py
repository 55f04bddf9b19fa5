"""The engines' processes, from the parent: one at a time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from sluice.bench.guard.plan import DEFAULTS
from sluice.bench.guard.work import Done, Work
from sluice.bench.processes import Fleet
from sluice.pipeline.config.types import RepeatTerminateConfig

_START_S = 300.0
_WORK_S = 1800.0
THREADS = 1


class Engine:
    """One that is loaded."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def decode(self, work: Work) -> Done:
        """Raises SluiceError when the process ended."""
        (process,) = self._fleet.processes
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(work) + b"\n")
        (line,) = await self._fleet.answers(_WORK_S)
        return msgspec.json.decode(line, type=Done)


@contextlib.asynccontextmanager
async def engine(
    backend: str, model: Path, max_batch: int, logs: Path, thresholds: RepeatTerminateConfig = DEFAULTS
) -> AsyncIterator[Engine]:
    """Started and warm; it ends with the block."""
    command = [sys.executable, "-m", "sluice.bench.guard.child", backend, str(model), str(THREADS), str(max_batch)]
    command.append(msgspec.json.encode(thresholds).decode())
    async with Fleet(f"{backend}-{model.name}", logs) as fleet:
        await fleet.start(command, _environment(), piped=True)
        await fleet.answers(_START_S)
        found = Engine(fleet)
        await found.decode(Work([[1, 2, 3]], 16))
        yield found


def _environment() -> dict[str, str]:
    """The same for every engine; only vLLM reads its own."""
    return {
        "OMP_NUM_THREADS": str(THREADS),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
