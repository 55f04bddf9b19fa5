"""One run as the pages see it: its newest state and rates, its configuration, its history, index and curves.

| waits for         | unblocked by                                                                  |
|-------------------|-------------------------------------------------------------------------------|
| the next snapshot | a second                                                                      |
| the broker        | the broker, or `_INSPECT_S`: the pages then show the last snapshot, and why   |

- One task inspects the run (`Monitor.run`), another one indexes its history, a little at a time so that pages are not
  delayed (`Monitor.keep_index`); pages and streams read their results.
- The configuration is the one stored with the run, if any; else the one this dashboard was started with. It is reread
  when its file changes: a restarted run may have another one.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from fastapi import Request
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.consumers.dashboard.timeline import Timeline
from sluice.consumers.history.curves import RunCurves
from sluice.consumers.history.index import HistoryIndex
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceFilter
from sluice.consumers.run_files import HISTORY, stored_config
from sluice.consumers.tasks.codec import HFTextCodec
from sluice.pipeline.config.load import RESOLVED
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import BrokerError, ConfigError, DataError, SluiceError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.status.inspection import Verdict, inspect, verdict
from sluice.pipeline.status.run_end import RunEnd, read_end, run_directory
from sluice.pipeline.status.snapshot import Snapshot
from sluice.pipeline.status.stages import Rates, Stage, stages
from sluice.pipeline.wire.keys import Keys

EVERY_S = 1.0
_INSPECT_S = 3.0
_ASK_S = 5.0
_AWAY = "the broker does not answer"
T = TypeVar("T")
_APART_S = 5.0  # between the two snapshots of the verdict
_INDEX_S, _REST_S = 0.02, 0.03  # while the index is behind
_TIMED, _TIMES_EVERY_S = 100, 3.0  # sequences
_OWN = "as this dashboard was started with"
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{2,}")  # the placeholders of an image


class Resolved(NamedTuple):
    """`origin` ends the sentence "These values are shown …"."""

    config: Config
    origin: str


class RunConfig:
    """Thread-safe; at worst two threads read at once."""

    def __init__(self, given: Config, directory: Path) -> None:
        self._given, self._directory = given, directory
        self._seen: tuple[tuple[int, int], Resolved] | None = None

    def read(self) -> Resolved:
        """Blocking; never raises."""
        try:
            status = (self._directory / RESOLVED).stat()
        except OSError:
            return Resolved(self._given, f"{_OWN}: the run has no {RESOLVED} here")
        stamp = status.st_mtime_ns, status.st_size
        if self._seen is None or self._seen[0] != stamp:
            self._seen = stamp, self._load()
        return self._seen[1]

    def _load(self) -> Resolved:
        try:
            found = stored_config(self._directory, self._given, ())
        except ConfigError as error:
            return Resolved(self._given, f"{_OWN}: the run's own cannot be read ({error})")
        return Resolved(found, f"as the run resolved them at its last start ({RESOLVED})")


class Monitor:
    """The newest snapshot of one run, plus queries that a page may make."""

    def __init__(self, config: Config, client: Redis, reader: HistoryReader, directory: Path | None = None) -> None:
        """`directory`: of the run's files; None: where the configuration says."""
        self.config, self.client, self.keys = config, client, Keys(config.run)
        self.reader, self.rates = reader, Rates()
        self.directory = directory or run_directory(config)
        self.run_config = RunConfig(config, self.directory)
        self.index = HistoryIndex(self.directory / HISTORY, self._prompt_decoder)
        self.curves = RunCurves(self.directory, self.index)
        self.timeline = Timeline(self.directory / HISTORY)
        self.others: Sequence[Path] = ()  # directories of more runs to compare with
        self.has_fleet = False  # this run is the first of a fleet's, which have a page
        self.times: list[tuple[str, float]] = []  # mean seconds of a sequence by what they were spent on
        self._timed_at = -math.inf
        self.newest = Snapshot(run=config.run, state="new")  # until the first one
        self.seen_at: float | None = None  # Unix time of that snapshot, in seconds
        self.problem: str | None = None  # why `newest` is out of date
        self.end: RunEnd | None = None  # how the run ended, by its files
        self.stored_at: float | None = None  # Unix s; set if the broker is a copy of what the run's stored last
        self.number = 0  # number of attempts, failed ones included
        self.closing = asyncio.Event()
        self._next = asyncio.Event()
        self._looks = deque[Snapshot](maxlen=60)

    async def refresh(self) -> None:
        """Take one snapshot; never raises if the broker is away."""
        try:
            async with asyncio.timeout(_INSPECT_S):
                self.newest = await inspect(self.client, self.keys, self.config.consumer.count, self.directory)
            self.rates.add(self.newest)
            if self.stored_at is None:
                self.timeline.add(self.newest)
            self._looks.append(self.newest)
            while len(self._looks) > 2 and self.newest.at - self._looks[1].at >= _APART_S:
                self._looks.popleft()
            self.seen_at, self.problem = time.time(), None
        except (RedisError, OSError, TimeoutError) as error:
            self._is_old(_AWAY, error)
        except (SluiceError, msgspec.MsgspecError) as error:  # written by another release, or by a foreign program
            self._is_old("the run's state cannot be read", error)
        self.number += 1
        self._next.set()
        self._next = asyncio.Event()

    def _is_old(self, problem: str, error: Exception) -> None:
        if self.problem is None:
            get_logger().warning(problem, error=repr(error))
        self.problem = problem

    def read_files(self) -> None:
        """The curves, times and end, from the run's directory. Blocking; never raises."""
        self.end = read_end(self.directory)
        try:
            self.curves.charts()
            if time.monotonic() - self._timed_at > _TIMES_EVERY_S:
                self._timed_at = time.monotonic()
                self.times = self.curves.times(self.reader.sequences(SequenceFilter(), _TIMED).rows)
        except DataError as error:
            get_logger().debug("no new curves or times", why=str(error))

    async def run(self) -> None:
        """Inspect once a second until cancelled."""
        while True:
            await asyncio.to_thread(self.read_files)
            await self.refresh()
            if self.timeline.is_due:
                await asyncio.to_thread(self.save)
            await asyncio.sleep(EVERY_S)

    async def keep_index(self) -> None:
        """Index the history until cancelled; a history that can't be read is reported once, and tried again."""
        reported = ""
        while True:
            left = 0
            try:
                left = await asyncio.to_thread(self.index.catch_up, _INDEX_S)
            except DataError as error:
                if str(error) != reported:
                    get_logger().warning("the history cannot be indexed", why=str(error))
                reported = str(error)
            await asyncio.sleep(_REST_S if left else EVERY_S)

    def _prompt_decoder(self) -> Callable[[Sequence[int]], str]:
        codec = HFTextCodec(Path(self.run_config.read().config.model.path))
        return lambda ids: _REPEATED.sub(r"\1…", codec.decode(ids))

    @property
    def verdict(self) -> Verdict:
        """What `sluice status --why` says, from snapshots of the last seconds."""
        return verdict(self._looks[0] if self._looks else self.newest, self.newest)

    async def next(self) -> None:
        """Wait for the next snapshot, or the end."""
        if not self.closing.is_set():
            await self._next.wait()

    def save(self) -> None:
        """Keep the timeline as it is now. Blocking; never raises."""
        if self.index.is_writer and self.stored_at is None:
            self.timeline.save()

    def close(self) -> None:
        """End all streams."""
        self.closing.set()
        self._next.set()

    def stages(self) -> list[Stage]:
        """The flow, from the producer to the trainer."""
        return stages(self.newest, self.rates)

    async def ask(self, question: Awaitable[T]) -> T:
        """Await a page's broker query; raises BrokerError if it takes too long."""
        try:
            async with asyncio.timeout(_ASK_S):
                return await question
        except TimeoutError as error:
            raise BrokerError(f"{_AWAY} within {_ASK_S:g} s; check that it runs (`sluice doctor`)") from error


def monitor_of(request: Request) -> Monitor:
    return request.app.state.monitor
