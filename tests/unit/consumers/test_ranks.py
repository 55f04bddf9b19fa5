"""What the ranks of a group learn of each other's errors and ends: two processes, and gloo."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from torch import distributed
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from sluice.consumers.training.ranks.group import Ranks
from sluice.pipeline.errors import ModelError, RankLost

TIMEOUT_S = 20.0
SHORT_S = 4.0  # the timeout where it is waited for
LONG_S = 2.5 * SHORT_S
WITHIN_S = 60.0  # for a verdict, on a busy machine


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
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _failing(error: Exception) -> Callable[[], bytes]:
    def work() -> bytes:
        raise error

    return work


def _rank(rank: int, port: int, timeout_s: float) -> Ranks:
    launched = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launched.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    distributed.init_process_group("gloo")
    return Ranks(timeout_s)


def _tried(rank: int, port: int) -> list[tuple[str, str]]:
    """What each failure is on this rank, and the work behind them all, which succeeds."""
    ranks, found = _rank(rank, port, TIMEOUT_S), list[tuple[str, str]]()
    for error in FAILURES:
        ranks.joined("names", b"null")
        try:
            ranks.told("a version", _failing(error))
        except Exception as raised:
            found.append((type(raised).__name__, str(raised)))
    ranks.joined("names", b"null")
    found.append(("", ranks.told("a version", lambda: b"v1").decode()))
    return found


def _told(rank: int, port: int, then: Callable[[], bytes]) -> tuple[bytes, bytes | str]:
    """What this rank is told of long work, and of the work behind it, or why the group ended."""
    ranks = _rank(rank, port, SHORT_S)
    first = ranks.told("a batch", _long)
    try:
        return first, ranks.told("a version", then, limit_s=SHORT_S)
    except RankLost as lost:
        return first, str(lost)


def _long() -> bytes:
    time.sleep(LONG_S)
    return b"samples"


def _stopped() -> bytes:
    time.sleep(SHORT_S)  # the other must know by then what this one does
    os.kill(os.getpid(), signal.SIGSTOP)
    return b"too late"


def _killed() -> bytes:
    time.sleep(SHORT_S)
    os.kill(os.getpid(), signal.SIGKILL)
    return b"never"


def _hangs() -> bytes:
    time.sleep(2 * WITHIN_S)
    return b"too late"


def _left(rank: int, port: int) -> str:
    """Why the group ended while this rank worked, and the other was killed."""
    ranks = _rank(rank, port, SHORT_S)
    ranks.joined("names", b"null")
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLost) as lost:
        ranks.told("a batch", _long)
    return str(lost.value)


@contextmanager
def _process() -> Generator[ProcessPoolExecutor]:
    """One; it is killed behind the block if it hasn't ended."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        pid = process.submit(os.getpid).result(WITHIN_S)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("ending", "how"),
    [
        pytest.param(_stopped, "has ended or was stopped,", id="stopped"),
        pytest.param(_killed, "has ended or was stopped,", id="killed"),
        pytest.param(_hangs, "hangs", id="hangs"),
    ],
)
def test_others_wait_for_long_work_of_rank_0_and_name_its_end(
    launchers_store: TCPStore, ending: Callable[[], bytes], how: str
) -> None:
    with _process() as first, _process() as second:
        first.submit(_told, 0, launchers_store.port, ending)
        told, then = second.submit(_told, 1, launchers_store.port, ending).result(WITHIN_S)
    assert told == b"samples"
    assert isinstance(then, str)
    assert then.startswith(f"rank 0 of 2 {how} in a version; so rank 1 failed in no command")


def test_the_end_of_another_is_raised_behind_the_work_of_rank_0(launchers_store: TCPStore) -> None:
    with _process() as first, _process() as second:
        own = first.submit(_left, 0, launchers_store.port)
        second.submit(_left, 1, launchers_store.port)
        assert own.result(WITHIN_S).startswith("rank 1 of 2 has ended or was stopped")


def test_any_error_of_rank_0_is_raised_by_all_and_the_next_call_works(launchers_store: TCPStore) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        own, told = (
            one.result() for one in [processes.submit(_tried, rank, launchers_store.port) for rank in range(2)]
        )
    assert own == [*((type(error).__name__, str(error)) for error in FAILURES), ("", "v1")]
    assert told == [
        ("OSError", "rank 0: [Errno 28] No space left on device"),
        ("OSError", "rank 0: [Errno 2] No such file"),
        ("ModelError", "rank 0: no such model"),
        ("SluiceError", "rank 0: ValueError: not a number"),
        ("", "v1"),
    ]
