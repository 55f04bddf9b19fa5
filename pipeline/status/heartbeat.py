"""The heartbeat: once a second, each process reports that it is alive, and what it waits for since when.

Times of a published row are by the broker's clock: whoever judges a row's age asks that clock, and a host's own may be
off by hours. Each beat measures by how much.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from sluice.pipeline.broker import append_only, retry
from sluice.pipeline.errors import MessageError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.status.text import wait_text
from sluice.pipeline.thread_pool import lost_threads
from sluice.pipeline.wire.codec import MOST, Unreadable, check_time, read_json
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.waits import Wait, WaitKind

BEAT_S = 1.0
ALIVE_S = 6.0  # an older heartbeat means that the process is dead
FORGET_S = 3600.0  # a dead process is shown for this long
_FORGET_EVERY_S = 600.0
_LAST_S = 2.0  # a failed process doesn't wait longer to report its error
_WORDS = 600  # characters
_JITTER_S = 0.5
_NUMBERS = frozenset((
    "version", "refused_version", "running", "sequences", "tokens", "memory_bytes", "cpu_ms", "step", "samples",
    "handed", "pending", "open_groups", "rollouts", "requests", "answered", "failed", "llm_calls", "scored",
    "weight_fallbacks",
))  # fmt: skip
HIDDEN_FACTS = frozenset(("owner", "metrics", "memory_bytes", "cpu_ms", "start_s"))
"""For other processes, or for the dashboard."""
_WORDS_OF = frozenset(("owner", "engine", "repeat_terminate", "metrics", "url"))
# A script that first frees memory may still write when the broker is full: a row replaces itself.
_PUT = """
local t = redis.call('TIME')
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return t
"""


_RowT = TypeVar("_RowT", bound="Heartbeat")


class Heartbeat(msgspec.Struct, kw_only=True):
    """What each process reports once a second, in the hash `processes`; times are Unix s by the broker's clock."""

    role: str
    name: str
    pid: int
    host: str
    started: float
    at: float = 0.0
    wait: Wait | None = None  # None while it works
    waiting_for: str | None = None  # `wait` as text, for people and for earlier releases, which have no `wait`
    waiting_since: float | None = None  # as in `wait`
    facts: dict[str, Any] = {}
    error: str | None = None  # last message of a failed role
    error_kind: str | None = None  # its class
    ended_at: float | None = None

    def __post_init__(self) -> None:
        for name in ("started", "at", "waiting_since", "ended_at"):
            check_time(getattr(self, name), name)
        if self.waiting_for is not None and (self.wait is None or self.wait.kind == WaitKind.OTHER):
            # From another release: an earlier one has no `wait`, a later one may have an unknown kind.
            since = self.wait.since if self.wait else self.waiting_since
            self.wait = Wait(kind=WaitKind.OTHER, subject=self.waiting_for, since=since)
        for name, value in self.facts.items():
            if name in _NUMBERS and value is not None and not (type(value) is int and abs(value) <= MOST):
                raise ValueError(f"its fact {name} is {value!r:.60}, and must be an integer")
            if name in _WORDS_OF and not isinstance(value, str):
                raise ValueError(f"its fact {name} is {value!r:.60}, and must be text")

    @property
    def version(self) -> int | None:
        """Version of the weights it works with."""
        return self.facts.get("version")


def read_row(raw: bytes, kind: type[_RowT]) -> _RowT:
    """A row of the process hash. Raises MessageError."""
    return read_json(raw, kind, "the heartbeat")


class StatusReporter:
    """Publishes this process's heartbeat; `waiting` names the cause of every wait.

    Times in `row` are by this host's clock, those of what is published by the broker's.
    """

    def __init__(self, client: Redis, keys: Keys, role: str, name: str) -> None:
        self._client, self._keys, self._unreadable = client, keys, Unreadable()
        self._ahead_s: float | None = None  # this host's clock before the broker's
        self._started = 0.0  # by the broker's; views tell two lives of a name apart by it
        self.row = Heartbeat(
            role=role, name=name, pid=os.getpid(), host=socket.gethostname(), started=time.time(), facts={}
        )

    def waiting(self, kind: WaitKind | None, subject: str = "", count: int | None = None) -> None:
        """Set what this process waits for; None while it works. A wait with the same kind and subject continues."""
        wait, before = None if kind is None else Wait(kind=kind, subject=subject, count=count), self.row.wait
        if wait is not None and before is not None and before.is_same(wait):
            wait = replace(wait, since=before.since)
        elif wait is not None:
            wait = replace(wait, since=time.time())
            get_logger().debug("waiting", cause=wait_text(wait))
        _set_wait(self.row, wait)

    def fact(self, **facts: Any) -> None:
        """Numbers for status pages: version, tokens, step, …"""
        self.row.facts.update(facts)

    def broker_time(self) -> float:
        """Unix s by the broker's clock, as measured by the last beat; this host's before the first one."""
        return time.time() - (self._ahead_s or 0.0)

    async def announcement(self) -> Heartbeat:
        """The row as it is published now."""
        if self._ahead_s is None:
            self._compare_clocks(await cast("Awaitable[Any]", cast(Any, self._client).time()), 0.0)
            self._started = self.row.started - (self._ahead_s or 0.0)
        ahead_s, self.row.at = self._ahead_s or 0.0, time.time()
        row = replace(self.row, started=self._started, at=self.row.at - ahead_s)
        row.ended_at = None if row.ended_at is None else row.ended_at - ahead_s
        wait = row.wait
        if (since := retry.waits_for_room()) is not None:
            wait = Wait(kind=WaitKind.BROKER_MEMORY, since=since)
        if wait is not None and wait.since is not None:
            wait = replace(wait, since=wait.since - ahead_s)
        _set_wait(row, wait)
        return row

    async def beat(self) -> None:
        """Publish once; works even if the broker is full."""
        if (lost := lost_threads()) or "lost_threads" in self.row.facts:
            self.row.facts["lost_threads"] = lost
        self.row.facts.update(memory_bytes=resident_bytes(), cpu_ms=int(1000 * time.process_time()))
        row = await self.announcement()
        arguments, asked = (row.name, msgspec.json.encode(row)), time.monotonic()
        answer = await cast("Awaitable[Any]", cast(Any, self._client).eval(_PUT, 1, self._keys.processes, *arguments))
        self._compare_clocks(answer, time.monotonic() - asked)

    def _compare_clocks(self, answer: Any, took_s: float) -> None:
        """Not by an answer that was long on its way (an outage, a pause of this process), unless it is the first.

        Small changes are the way's: times that do not change must not jitter.
        """
        seconds, micros = map(int, answer)
        ahead_s, before_s = time.time() - (seconds + micros / 1e6), self._ahead_s
        if before_s is None or (took_s < BEAT_S and abs(ahead_s - before_s) > _JITTER_S):
            self._ahead_s = ahead_s

    async def last_words(self, error: BaseException) -> None:
        """Publish why this process ends, best effort; never raises."""
        self.waiting(None)
        self.row.error = (str(error) or repr(error))[:_WORDS]
        self.row.error_kind = type(error).__name__
        self.row.ended_at = time.time()
        try:
            async with asyncio.timeout(_LAST_S):
                await self.beat()
        except (TimeoutError, RedisError, OSError) as problem:
            get_logger().warning("could not tell the broker why this process ends", cause=repr(problem))

    async def run(self) -> None:
        """Publish until cancelled; occasionally remove the rows of processes that died long ago."""
        due, renewal = time.monotonic(), append_only.Renewal()
        while True:
            began = time.monotonic()
            try:
                await self.beat()
                await renewal.look(self._client, was_refused=retry.was_unwritten())
                if time.monotonic() >= due:
                    due = time.monotonic() + _FORGET_EVERY_S
                    await forget_dead(self._client, self._keys)
            except ResponseError as error:  # the key has another type: work continues without status
                self._unreadable.skip(self._keys.processes, self.row.name, error)
            # One that an outage held up says how it was before: the next one follows at once.
            is_late = time.monotonic() - began > ALIVE_S / 2
            await asyncio.sleep(0 if is_late else BEAT_S)

    async def farewell(self) -> None:
        """Remove the row: this process ended cleanly."""
        with contextlib.suppress(ResponseError):  # the key has another type: there is no row
            await cast("Awaitable[int]", self._client.hdel(self._keys.processes, self.row.name))


def resident_bytes() -> int | None:
    """Of this process only; None where the system doesn't report it (no /proc)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _set_wait(row: Heartbeat, wait: Wait | None) -> None:
    row.wait = wait
    row.waiting_for, row.waiting_since = (None, None) if wait is None else (wait_text(wait), wait.since)


async def forget_dead(client: Redis, keys: Keys) -> int:
    """Remove the rows of processes that died more than `FORGET_S` ago; returns how many."""
    raw = cast(Any, client)
    oldest = (await raw.time())[0] - FORGET_S
    rows = cast("dict[bytes, bytes]", await raw.hgetall(keys.processes))
    dead = [name for name, row in rows.items() if _last_beat(row) < oldest]
    return int(await raw.hdel(keys.processes, *dead)) if dead else 0


def _last_beat(row: bytes) -> float:
    """An unreadable row may come from a newer release: it stays, and an inspection lists it."""
    try:
        return read_row(row, Heartbeat).at
    except MessageError:
        return math.inf
