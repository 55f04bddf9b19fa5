"""The ranks of one trainer: processes that hold parts of the model and do the same work at the same time.

    rank 0: the trainer ──lead(command)──▶ every rank does it, with collectives in between
    others: receive() ──▶ do it ──▶ receive() …                until rank 0 closes the group

- Rank 0 alone has the role, the broker and the run's records. The others know what its commands hold.
- Commands go as bytes over a gloo group of their own, whatever carries the gradients.
- A barrier comes before each command, and while rank 0 has none, it sends an empty one: a beat. So a rank that is
  killed or hangs is missed within `timeout_s`, at work or idle. That ends the group: no rank can go on alone.
- While rank 0 does alone what all will be told, a thread sends the beats. It can't see whether that work hangs, so the
  work has a deadline of its own, or the beats have one.
- gloo doesn't say whom it missed. So each rank tells the group's store what it does, again and again from a thread of
  its own: who doesn't any more was killed or stopped, and who is at work when the others have failed hangs.

| waits for                    | unblocked by                                                   |
|------------------------------|----------------------------------------------------------------|
| other ranks, in a collective | all ranks; the end of one of them; `trainer.rank_timeout_s`    |
| a command                    | rank 0, at the latest its next beat; `trainer.rank_timeout_s`  |
| rank 0's work, in `told`     | the work's own deadline, or its limit; `trainer.rank_timeout_s`|
|                              | after the last beat                                            |
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from sluice.pipeline import errors
from sluice.pipeline.errors import RankLost, SluiceError
from sluice.pipeline.logs import get_logger

_ROLL_CALL_S = 15.0  # after a collective failed; the others leave the same one about then
_CLOSE_S = 5.0
_BEATS = 4  # within the timeout
START = b"\x01"  # what the other ranks hear first
_CLOSE, _BEAT = b"", b"\x00"
_WELL, _BADLY = b"\x02", b"\x03"  # how `told` went
_RAISED: dict[str, type[Exception]] = {  # by the other ranks, by name
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SluiceError)},
    "OSError": OSError,
}
_IDLE, _FAILED = "no command", "a failure"
_REPEAT_S = 1.0
_END_S = 2.0
_STORE_S = 20.0


class Ranks:
    """This process's place in the group; the default process group exists already."""

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout_s = timeout_s
        self._lock, self._is_whole = threading.Lock(), True
        self._beating: asyncio.Task[None] | None = None
        self._between = _IDLE  # what this rank does outside of collectives
        self._commands, self._barrier = _gloo(timeout_s), _gloo(timeout_s)
        self._presence = _Presence(self.rank, self.size)
        self._beside: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def leading(self, name: str, command: bytes) -> Generator[None]:
        """Send a command; inside the block this rank does its own part. Raises RankLost."""
        with self._lock:
            self._send(name, command)
            with self._missing_named(name):
                yield

    def receive(self) -> bytes | None:
        """The next command of rank 0; None if it has closed the group. Raises RankLost."""
        while True:
            command = self._receive()
            if command != _BEAT:
                return None if command == _CLOSE else command

    @contextlib.contextmanager
    def following(self, name: str) -> Generator[None]:
        """The block does this rank's part of a command. Raises RankLost."""
        with self._missing_named(name):
            yield

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncGenerator[None]:
        """Inside the block idle ranks hear a beat of rank 0; behind it the group is closed."""
        self._beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            self._beating.cancel()
            await asyncio.wait({self._beating})
            await asyncio.to_thread(self._close)

    async def watch(self) -> None:
        """Raises RankLost once an idle rank is missed, inside `kept`."""
        assert self._beating is not None
        await asyncio.shield(self._beating)

    def told(self, name: str, work: Callable[[], bytes], limit_s: float = math.inf) -> bytes:
        """What `work` returns on rank 0, which alone does it; all ranks raise its error, as OSError or one of ours.

        The others wait for as long as rank 0 sends beats. They raise RankLost, with `name`, if none has come for the
        group's timeout: rank 0 was killed or stopped, or the work hangs. Beats end with the work, or after `limit_s`
        seconds: give that if the work has no deadline of its own. If another rank is lost, rank 0 raises RankLost, too,
        once its work has ended.
        """
        if not self.leads:
            said = self.receive() or b""
            if said[:1] == _WELL:
                return said[1:]
            kind, _, why = said[1:].decode().partition(" ")
            raise _RAISED[kind](f"rank 0: {why}")
        try:
            with self._alone(name, limit_s):
                found = work()
        except Exception as error:
            if self._is_whole:
                with contextlib.suppress(RankLost), self.leading(name, _BADLY + _told_of(error).encode()):
                    pass
            raise
        with self.leading(name, _WELL + found):
            return found

    def joined(self, name: str, own: bytes) -> list[bytes]:
        """Every rank's own, on all ranks. Raises RankLost."""
        with self._missing_named(name):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(own)]), group=self._commands)
            longest = max(1, *map(int, lengths))
            found = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
            padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
            dist.all_gather(found, padded, group=self._commands)
        return [row.numpy().tobytes()[: int(length)] for row, length in zip(found, lengths, strict=True)]

    def group_beside(self, timeout_s: float) -> dist.ProcessGroup:
        """For collectives of another thread, beside the commands; all ranks ask for it at the same time."""
        if self._beside is None:
            self._beside = _gloo(timeout_s)
        return self._beside

    @contextlib.contextmanager
    def beside(self, doing: str) -> Generator[None]:
        """The block waits for collectives of another thread. Raises RankLost."""
        try:
            yield
        except (SluiceError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # as in `_missing_named`
            silent = self._presence.silent()
            named = "; ".join(f"rank {rank} of {self.size} {how}" for rank, how in silent.items())
            raise RankLost(f"{named or 'a rank is gone'}; so rank {self.rank} failed in {doing}: {error}") from error

    def sum(self, values: Sequence[float]) -> list[float]:
        """Of every rank's values, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The same with the maximum."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, op=how, group=self._commands)
        return total.tolist()

    def _send(self, name: str, command: bytes, timeout_s: float | None = None) -> None:
        with self._missing_named(f"the barrier before {name}"):
            limit = timedelta(seconds=self._timeout_s if timeout_s is None else timeout_s)
            dist.monitored_barrier(self._barrier, timeout=limit)
            dist.broadcast(torch.tensor([len(command)]), 0, group=self._commands)
            if command:
                dist.broadcast(torch.frombuffer(bytearray(command), dtype=torch.uint8), 0, group=self._commands)

    def _receive(self) -> bytes:
        with self._missing_named(_IDLE):
            dist.monitored_barrier(self._barrier, timeout=timedelta(seconds=self._timeout_s))
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, 0, group=self._commands)
            command = torch.empty(int(length), dtype=torch.uint8)
            if len(command):
                dist.broadcast(command, 0, group=self._commands)
        return command.numpy().tobytes()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._timeout_s / _BEATS)
            await asyncio.to_thread(self._beat_once)

    def _beat_once(self) -> None:
        if self._lock.acquire(blocking=False):  # else the ranks are at work
            try:
                self._send("a beat", _BEAT)
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _alone(self, doing: str, limit_s: float) -> Generator[None]:
        """Inside the block the others, in `receive`, hear beats of this rank. Raises what a beat raised, behind it."""
        is_over, lost, until = threading.Event(), list[Exception](), time.monotonic() + limit_s

        def beat() -> None:
            try:
                while not is_over.wait(self._timeout_s / _BEATS):
                    if time.monotonic() > until:
                        get_logger().error("takes too long; the other ranks are left", work=doing, limit_s=limit_s)
                        return
                    self._beat_once()
            except Exception as error:
                get_logger().error("ranks are lost", during=doing, cause=str(error))  # the block can't be interrupted
                lost.append(error)

        self._between = doing
        self._presence.say(doing)
        beating = threading.Thread(target=beat, name="sluice-rank-beat", daemon=True)
        try:
            beating.start()  # in here: an interrupt must not leave it beating
            yield
        finally:
            self._between = _IDLE
            is_over.set()
            if beating.is_alive():
                beating.join()  # a beat has the group's timeout, and a command must not overtake it
            self._presence.say(_FAILED if lost else _IDLE)
        if lost:
            raise lost[0]

    def _close(self) -> None:
        if not self._is_whole or not self._lock.acquire(timeout=_CLOSE_S):
            return  # the others notice when this process ends
        try:
            self._send("the end", _CLOSE, _CLOSE_S)
        except RankLost as error:
            get_logger().warning("ranks were not told of the end", cause=str(error))
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _missing_named(self, doing: str) -> Generator[None]:
        """If a collective in the block fails, say which ranks are missing."""
        self._presence.say(doing)
        try:
            yield
        except (SluiceError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # gloo has no type of its own for a peer that is gone
            self._is_whole = False
            self._presence.say(_FAILED)
            if missing := self._presence.missing(min(_ROLL_CALL_S, self._timeout_s)):
                named = "; ".join(f"rank {rank} of {self.size} {how}" for rank, how in missing.items())
                raise RankLost(
                    f"{named}; so rank {self.rank} failed in {doing}: {error}; if a rank is only slow, raise "
                    "trainer.rank_timeout_s"
                ) from error
            raise
        self._presence.say(self._between)


class _Presence:
    """What each rank does, in the group's store; a thread repeats this one's."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._doing, self._changed = _IDLE, threading.Event()
        self._store, self._is_over = _store(), False
        self._thread = threading.Thread(target=self._repeat, name="sluice-rank", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def say(self, doing: str) -> None:
        self._doing = doing
        self._changed.set()

    def missing(self, limit_s: float) -> dict[int, str]:
        """The other ranks that have fallen silent, or are still at work when this one has failed."""
        try:
            until = time.monotonic() + limit_s
            while True:
                now, silent = self._heard()
                busy = {rank: f"hangs in {what[1]}" for rank, what in now.items() if what[1] not in (_IDLE, _FAILED)}
                if silent or not busy or time.monotonic() > until:
                    return silent or busy
        except RuntimeError as error:  # the store ends with the launcher
            get_logger().warning("cannot ask the other ranks what they do", cause=str(error))
            return {}

    def silent(self) -> dict[int, str]:
        """The other ranks that have fallen silent."""
        try:
            return self._heard()[1]
        except RuntimeError:
            return {}

    def _heard(self) -> tuple[dict[int, tuple[str, str]], dict[int, str]]:
        """What the others say, and those that say nothing new."""
        first = self._seen()
        time.sleep(2 * _REPEAT_S)
        now = self._seen()
        return now, {
            rank: f"has ended or was stopped, in {what[1]}" if what[0] else "has ended, or is late, in its start"
            for rank, what in now.items()
            if what[0] == first[rank][0]
        }

    def _seen(self) -> dict[int, tuple[str, str]]:
        """Of every other rank: how often it has spoken, and what it does; empty before it has spoken once."""
        found: dict[int, tuple[str, str]] = {}
        for rank in range(self._size):
            if rank != self._rank:
                name = str(rank)
                said = self._store.get(name) if self._store.check([name]) else b""
                count, _, doing = said.decode().partition(" ")
                found[rank] = count, doing
        return found

    def _end(self) -> None:
        """torch aborts a process that Python takes down while a thread is inside it."""
        self._is_over = True
        self._changed.set()
        self._thread.join(_END_S)

    def _repeat(self) -> None:
        store = _store()  # a connection of its own: one that waits for an answer is locked
        for count in itertools.count():
            self._changed.clear()
            if self._is_over:
                return
            try:
                store.set(str(self._rank), f"{count} {self._doing}")
            except RuntimeError:  # the others see that it has fallen silent
                return
            self._changed.wait(_REPEAT_S)


def _told_of(error: Exception) -> str:
    """Its kind, and what the other ranks say of it."""
    kinds = [each.__name__ for each in type(error).__mro__ if each.__name__ in _RAISED]
    return f"{kinds[0]} {error}" if kinds else f"{SluiceError.__name__} {type(error).__name__}: {error}"


def _gloo(timeout_s: float) -> dist.ProcessGroup:
    """All ranks."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))


def _store() -> PrefixStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=_STORE_S)
    return PrefixStore("sluice", TCPStore(host, port, is_master=False, timeout=limit))
