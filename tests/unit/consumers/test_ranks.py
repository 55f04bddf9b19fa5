"""What the ranks of a group learn of each other's errors: two processes, and gloo."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
from torch import distributed
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from sluice.consumers.training.ranks.group import Ranks
from sluice.pipeline.errors import ModelError

TIMEOUT_S = 20.0


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


def _tried(rank: int, port: int) -> list[tuple[str, str]]:
    """What each failure is on this rank, and the work behind them all, which succeeds."""
    launched = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launched.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    distributed.init_process_group("gloo")
    ranks, found = Ranks(TIMEOUT_S), list[tuple[str, str]]()
    for error in FAILURES:
        ranks.joined("names", b"null")
        try:
            ranks.told("a version", _failing(error))
        except Exception as raised:
            found.append((type(raised).__name__, str(raised)))
    ranks.joined("names", b"null")
    found.append(("", ranks.told("a version", lambda: b"v1").decode()))
    return found


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
