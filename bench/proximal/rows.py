"""Sequences that run until they are stopped, and when each of their tokens came.

- They begin with tokens that were decoded before, as a redelivered job does; these are random ids, for costs do not
  depend on what they say.
- Times are `time.perf_counter` seconds, taken in the engine's thread as it reports the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from sluice.pipeline.errors import DeadlineExceeded, SluiceError
from sluice.pipeline.wire.messages import SamplingParams
from sluice.workers.engine.contracts import Backend, SequenceOutput, SequenceRequest, SequenceSoFar

PROMPT_IDS = 256  # the byte tokens
_WAIT_S = 120.0


def requests(version: int, prompt: int, generated: Sequence[int], room: int, seed: int) -> list[SequenceRequest]:
    """A row for each number of generated tokens, all of `version`; each may have `room` more. Nothing ends early."""
    chance = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [chance.randrange(PROMPT_IDS) for _ in range(count)]

    return [
        SequenceRequest(
            f"{seed}:{index}",
            tuple(ids(prompt)),
            SamplingParams(temperature=1.0, max_new_tokens=count + room),
            seed=index,
            so_far=SequenceSoFar(0, ids(count), [0.0] * count, [version] * count),
            eos_token_ids=(),
        )
        for index, count in enumerate(generated)
    ]


@dataclass
class Turn:
    """The first tokens under a version: when the last one before came, and by row."""

    before: float
    rows: dict[int, float] = field(default_factory=dict)


class Running:
    """Rows in an engine. `saw` is called in its thread, all else in the loop's."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.times: list[float] = []  # of each new token, whichever row has it
        self.turns: dict[int, Turn] = {}  # by version
        self.ready = 0  # new tokens there were when the last row had its first; 0 before
        self.tasks: list[asyncio.Task[SequenceOutput]] = []
        self._started: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._holds: Callable[[], bool] | None = None
        self._held = asyncio.Event()
        self._lock = threading.Lock()  # of `_holds`

    @property
    def outputs(self) -> list[SequenceOutput]:
        """What the rows came to, once they were stopped."""
        return [task.result() for task in self.tasks]

    def steps(self) -> float:
        """New tokens of a row since all of them run; 0 before."""
        return (len(self.times) - self.ready) / self.count if self.ready else 0.0

    def turned(self, version: int) -> bool:
        """Every row has a token of this version."""
        return version in self.turns and len(self.turns[version].rows) == self.count

    def saw(self, row: int, so_far: SequenceSoFar) -> None:
        """New tokens of one row."""
        now, version = time.perf_counter(), so_far.versions[-1]
        if version not in self.turns:
            self.turns[version] = Turn(self.times[-1] if self.times else now)
        self.turns[version].rows.setdefault(row, now)
        self.times += [now] * len(so_far.token_ids)
        self._started.add(row)
        if not self.ready and len(self._started) == self.count:
            self.ready = len(self.times)
        with self._lock:
            if self._holds is not None and self._holds():
                self._holds = None
                self._loop.call_soon_threadsafe(self._held.set)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Return once it holds, looked at with every token. Raises SluiceError when a row ends, or DeadlineExceeded."""
        self._held = asyncio.Event()
        with self._lock:
            self._holds = None if holds() else holds
            waits = self._holds is not None
        if not waits:
            return
        waiting = asyncio.create_task(self._held.wait())
        done, _ = await asyncio.wait({waiting, *self.tasks}, timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not done:
            raise DeadlineExceeded(f"waited {_WAIT_S:.0f} s for {what}")
        for task in self.tasks:
            if task.done():
                raise SluiceError(f"a row ended before {what}: {task.result().finish_reason}")


@contextlib.asynccontextmanager
async def running(backend: Backend, asks: Sequence[SequenceRequest]) -> AsyncIterator[Running]:
    """All of them in the engine; they are stopped with the block."""
    rows = Running(len(asks))
    watched = [
        replace(ask, report_every=1, report=functools.partial(rows.saw, index)) for index, ask in enumerate(asks)
    ]
    rows.tasks = [asyncio.create_task(backend.decode(ask)) for ask in watched]
    try:
        yield rows
    finally:
        for ask in watched:
            backend.abort(ask.seq_key)
        await asyncio.wait(rows.tasks, timeout=_WAIT_S)
