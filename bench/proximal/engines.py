"""The engines' processes, from the parent: one at a time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from sluice.bench.processes import Fleet
from sluice.bench.proximal.work import Failed, Ready, Seen, ServeWork, Work
from sluice.pipeline.errors import SluiceError

THREADS = 1
_START_S = 300.0
_WORK_S = 1800.0
_SEEN_S = 120.0
_FAILED = b'{"type":"failed"'


class Engine:
    """One that is loaded."""

    def __init__(self, backend: str, fleet: Fleet) -> None:
        self._backend, self._fleet = backend, fleet

    async def measure(self, work: Work) -> dict[str, Any]:
        """The fields of a part. Raises SluiceError when it failed, or the process ended."""
        self._tell(work)
        return msgspec.json.decode(await self._line(_WORK_S), type=dict[str, Any])

    @contextlib.asynccontextmanager
    async def serving(self, settings: list[str]) -> AsyncIterator[int]:
        """It serves a run's queue for the length of the block; gives the version of its weights."""
        self._tell(ServeWork(settings))
        yield msgspec.json.decode(await self._line(_START_S), type=Ready).version
        self._write(b"stop\n")
        while await self._line(_SEEN_S) != b"{}\n":
            pass

    async def seen(self) -> Seen:
        """The next version of which the worker decoded a token."""
        return msgspec.json.decode(await self._line(_SEEN_S), type=Seen)

    def _tell(self, work: Work) -> None:
        self._write(msgspec.json.encode(work) + b"\n")

    def _write(self, line: bytes) -> None:
        (process,) = self._fleet.processes
        assert process.stdin is not None
        process.stdin.write(line)

    async def _line(self, deadline_s: float) -> bytes:
        (line,) = await self._fleet.answers(deadline_s)
        if line.startswith(_FAILED):
            raise SluiceError(f"the {self._backend} engine: {msgspec.json.decode(line, type=Failed).why}")
        return line


@contextlib.asynccontextmanager
async def engine(backend: str, model: Path, variants: Path, max_batch: int, logs: Path) -> AsyncIterator[Engine]:
    """Loaded; it ends with the block."""
    command = [sys.executable, "-m", "sluice.bench.proximal.child", backend, str(model), str(variants), str(max_batch)]
    async with Fleet(f"engine-{backend}", logs) as fleet:
        await fleet.start(command, environment(), piped=True)
        await fleet.answers(_START_S)
        yield Engine(backend, fleet)


def environment() -> dict[str, str]:
    """The same for every process; only vLLM reads its own."""
    return {
        "OMP_NUM_THREADS": str(THREADS),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
