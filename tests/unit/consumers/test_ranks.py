"""What the ranks of a group learn of each other's errors and ends: two processes, and gloo."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from sluice.consumers.training.ranks import group
from sluice.consumers.training.ranks.group import Ranks
from sluice.pipeline.errors import ModelError, RankLost
from tests.deadlines import HANG_S, RUN_S

SHORT_S = 1.0  # the timeout where it is waited for
BEAT_S = 0.1
SERVER = multiprocessing.get_context("forkserver")  # torch is imported once for all ranks
SERVER.set_forkserver_preload([group.__name__])


class _Odd(ModelError):
    """Known to one rank alone."""


FAILURES = [
    OSError(errno.ENOSPC, "No space left on device"),
    FileNotFoundError(errno.ENOENT, "No such file"),
    _Odd("no such model"),
    ValueError("not a number"),
]


@pytest.fixture
def launchers_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HANG_S))


def _failing(error: Exception) -> Callable[[], bytes]:
    def work() -> bytes:
        raise error

    return work


def _rank(rank: int, port: int) -> Ranks:
    launched = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launched.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    group._BEATS, group._REPEAT_S = round(HANG_S / BEAT_S), BEAT_S
    distributed.init_process_group("gloo")
    return Ranks(HANG_S)


@cache
def _shared() -> PrefixStore:
    """The group's store, over a connection of these tests: a new one may take seconds."""
    return group._store()


def _said(of: int) -> str:
    """How often a rank has spoken, and what it does."""
    return _shared().get(str(of)).decode()


def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def _tried(rank: int, port: int) -> list[tuple[str, str]]:
    """What each failure is on this rank, and the work behind them all, which succeeds."""
    ranks, found = _rank(rank, port), list[tuple[str, str]]()
    for error in FAILURES:
        ranks.joined("names", b"null")
        try:
            ranks.told("a version", _failing(error))
        except Exception as raised:
            found.append((type(raised).__name__, str(raised)))
    ranks.joined("names", b"null")
    found.append(("", ranks.told("a version", lambda: b"v1").decode()))
    return found


def _leads(port: int) -> None:
    """Long work, and some that the test ends; all that it is told then is that this has begun."""
    ranks, heard = _rank(0, port), threading.Semaphore(0)

    def beat() -> None:
        Ranks._beat_once(ranks)
        heard.release()

    def long() -> bytes:
        assert all(heard.acquire(timeout=HANG_S) for _ in range(5))
        return b"samples"

    def ended() -> bytes:
        _until(lambda: _said(0).endswith(" a version"), "the others to know what this one does")
        _shared().set("begun", "")
        time.sleep(RUN_S)
        return b"too late"

    ranks._beat_once = beat
    ranks.told("a batch", long)
    ranks.told("a version", ended, limit_s=0)  # no beat: amid one, this rank would be in that


def _follows(port: int, speaks: bool) -> tuple[bytes, str]:
    """What this rank is told of the long work, and why the group ended in the work behind it."""
    ranks = _rank(1, port)
    first = ranks.told("a batch", bytes)
    _shared().set("told", "")
    _shared().wait(["ended"], timedelta(seconds=HANG_S))
    ranks._timeout_s, distributed.monitored_barrier = SHORT_S, _limited(distributed.monitored_barrier)
    if speaks:  # between two looks, however late its thread is
        group.time = SimpleNamespace(monotonic=time.monotonic, sleep=_until_rank_0_has_spoken)
    with pytest.raises(RankLost) as lost:
        ranks.told("a version", bytes)
    return first, str(lost.value)


def _limited(barrier: Callable[..., None]) -> Callable[..., None]:
    """gloo has the group's timeout on all ranks but 0, and that can't be shortened once it is wanted to expire."""
    thread = ThreadPoolExecutor(1)

    def limited(group: distributed.ProcessGroup, timeout: timedelta) -> None:
        try:
            thread.submit(barrier, group, timeout=timeout).result(timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("nobody came") from error

    return limited


def _until_rank_0_has_spoken(_: float) -> None:
    before = _said(0)
    _until(lambda: _said(0) != before, "rank 0 to speak")


def _left(rank: int, port: int, speaks: bool) -> str:
    """Why the group ended while this rank worked, and the other was killed."""
    if rank and not speaks:
        group._Presence._repeat = lambda self: None
    ranks = _rank(rank, port)
    ranks.joined("names", b"null")
    if rank:
        if speaks:
            _shared().wait([str(rank)], timedelta(seconds=HANG_S))
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> bytes:
        [beating] = [thread for thread in threading.enumerate() if thread.name == "sluice-rank-beat"]
        beating.join(HANG_S)  # it has missed the other one
        return b"samples"

    with pytest.raises(RankLost) as lost:
        ranks.told("a batch", work)
    return str(lost.value)


@contextmanager
def _process() -> Generator[tuple[ProcessPoolExecutor, int]]:
    """One, and its pid; it is killed behind the block if it hasn't ended."""
    with ProcessPoolExecutor(1, SERVER) as process:
        pid = process.submit(os.getpid).result(HANG_S)
        try:
            yield process, pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_still(pid: int) -> bool:
    """Whether it is stopped or dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("sent", "how"),
    [
        pytest.param(signal.SIGSTOP, "has ended or was stopped,", id="stopped"),
        pytest.param(signal.SIGKILL, "has ended or was stopped,", id="killed"),
        pytest.param(None, "hangs", id="hangs"),
    ],
)
def test_others_wait_for_long_work_of_rank_0_and_name_its_end(
    launchers_store: TCPStore, sent: signal.Signals | None, how: str
) -> None:
    shared = PrefixStore("sluice", launchers_store)
    with _process() as (first, pid), _process() as (second, _):
        first.submit(_leads, launchers_store.port)
        following = second.submit(_follows, launchers_store.port, sent is None)
        shared.wait(["begun", "told"], timedelta(seconds=HANG_S))
        if sent:
            os.kill(pid, sent)
            _until(lambda: _is_still(pid), "the signal to arrive")
        shared.set("ended", "")
        told, then = following.result(HANG_S)
    assert told == b"samples"
    assert then.startswith(f"rank 0 of 2 {how} in a version; so rank 1 failed in no command")


@pytest.mark.parametrize(
    ("speaks", "how"),
    [
        pytest.param(True, "has ended or was stopped, in ", id="killed at work"),
        pytest.param(False, "has ended, or is late, in its start; ", id="killed before it spoke"),
    ],
)
def test_the_end_of_another_is_raised_behind_the_work_of_rank_0(
    launchers_store: TCPStore, speaks: bool, how: str
) -> None:
    with _process() as (first, _), _process() as (second, _):
        own = first.submit(_left, 0, launchers_store.port, speaks)
        second.submit(_left, 1, launchers_store.port, speaks)
        assert own.result(HANG_S).startswith(f"rank 1 of 2 {how}")


def test_any_error_of_rank_0_is_raised_by_all_and_the_next_call_works(launchers_store: TCPStore) -> None:
    with ProcessPoolExecutor(2, SERVER) as processes:
        own, told = (
            one.result(HANG_S) for one in [processes.submit(_tried, rank, launchers_store.port) for rank in range(2)]
        )
    assert own == [*((type(error).__name__, str(error)) for error in FAILURES), ("", "v1")]
    assert told == [
        ("OSError", "rank 0: [Errno 28] No space left on device"),
        ("OSError", "rank 0: [Errno 2] No such file"),
        ("ModelError", "rank 0: no such model"),
        ("SluiceError", "rank 0: ValueError: not a number"),
        ("", "v1"),
    ]
