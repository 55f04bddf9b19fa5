"""All ids that a run has trained: exact, flat in memory, and never ahead of the checkpoint."""

from __future__ import annotations

import contextlib
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.consumers.training.step_log import StepLog
from sluice.pipeline.queue.trained import INDEX, LEDGER, TrainedIds, trained_among


def write(run_dir: Path, first: int, last: int, each: int = 100) -> None:
    """Steps first…last of the ledger."""
    with (run_dir / LEDGER).open("ab") as stream:
        for step in range(first, last + 1):
            ids = [f"{{r}}:{step}-{k}:0" for k in range(each)]
            stream.write(msgspec.json.encode({"step": step, "seq_ids": ids}) + b"\n")


def opened(run_dir: Path, step: int, recent: list[str] | None = None) -> TrainedIds:
    found = TrainedIds(run_dir)
    found.open(step, recent or [])
    return found


ASKED = ["{r}:1-0:0", "{r}:70-99:0", "{r}:100-3:0", "{r}:101-0:0", "{r}:1-0:1"]


def test_every_id_is_known_after_a_restart_and_no_other(tmp_path: Path) -> None:
    write(tmp_path, 1, 100)
    for _ in range(2):
        ids = opened(tmp_path, 100)
        assert ids.known(ASKED) == set(ASKED[:3])
        ids.close()
    assert trained_among(tmp_path, ASKED) == set(ASKED[:3])


def test_steps_that_are_done_again_are_not_known(tmp_path: Path) -> None:
    write(tmp_path, 1, 100)
    opened(tmp_path, 100).close()
    StepLog(tmp_path / LEDGER).cut_after(69)
    ids = opened(tmp_path, 69)
    assert ids.known(ASKED) == {ASKED[0]}
    write(tmp_path, 70, 70)
    ids.add(70, [ASKED[1]])
    ids.close()
    assert opened(tmp_path, 70).known(ASKED) == set(ASKED[:2])


def test_a_damaged_line_moves_nothing_that_comes_after_it(tmp_path: Path) -> None:
    write(tmp_path, 1, 50)
    opened(tmp_path, 50).close()
    write(tmp_path, 51, 100)  # in the ledger, not in the index
    lines = (tmp_path / LEDGER).read_bytes().split(b"\n")
    (tmp_path / LEDGER).write_bytes(b"\n".join([*lines[:9], b"\xff" * len(lines[9]), *lines[10:]]))
    StepLog(tmp_path / LEDGER).cut_after(100)
    every = [f"{{r}}:{step}-0:0" for step in range(1, 101)]
    assert opened(tmp_path, 100).known(every) == set(every)


def test_what_is_not_stored_yet_is_read_from_the_ledger_by_others(tmp_path: Path) -> None:
    write(tmp_path, 1, 50)
    ids = opened(tmp_path, 50)
    write(tmp_path, 51, 100)
    ids.add(51, [])  # too few to be stored
    assert trained_among(tmp_path, ASKED) == {ASKED[0]}, "nothing beyond the newest checkpoint"
    ids.durable(100)
    assert trained_among(tmp_path, ASKED) == set(ASKED[:3])
    ids.durable(99)
    assert trained_among(tmp_path, ASKED) == set(ASKED[:2])


@pytest.mark.parametrize("bytes_there", [b"", b"no database at all" * 100])
def test_an_index_that_is_damaged_is_made_again(tmp_path: Path, bytes_there: bytes) -> None:
    write(tmp_path, 1, 100)
    (tmp_path / INDEX).write_bytes(bytes_there)
    assert opened(tmp_path, 100).known(ASKED) == set(ASKED[:3])


def test_a_damaged_index_or_line_hides_nothing_from_the_trainer_and_stops_no_producer(tmp_path: Path) -> None:
    write(tmp_path, 1, 1)
    with (tmp_path / LEDGER).open("ab") as stream:
        stream.write(b'{"step": 2, "seq_i\n')
    write(tmp_path, 3, 3)
    ids = opened(tmp_path, 3, ["mine"])
    assert ids.known(["{r}:3-0:0", "mine", "other"]) == {"{r}:3-0:0", "mine"}
    ids.close()
    (tmp_path / INDEX).write_bytes(b"no database at all" * 100)
    assert trained_among(tmp_path, ASKED) == set()


@pytest.mark.parametrize(
    "line", [b'{"step": 9223372036854775808, "seq_ids": ["a"]}', b'{"step": -1, "seq_ids": []}', b"[" * 5000, b"\xff",
             b'{"step": 2, "seq_ids": ["\\ud800"]}', b'{"step": 2, "seq_ids": [], "x": ' + b"[" * 5000]
)  # fmt: skip
def test_a_line_that_is_none_costs_that_line(tmp_path: Path, line: bytes) -> None:
    with (tmp_path / LEDGER).open("ab") as stream:
        stream.write(line + b"\n")
    write(tmp_path, 1, 1)
    ids = opened(tmp_path, 1)
    assert ids.known(ASKED) == {ASKED[0]}
    ids.close()
    assert trained_among(tmp_path, ASKED) == {ASKED[0]}


@pytest.mark.parametrize("place", ["x", -5, None, 1.5, b"\xff", 2**62])
def test_a_place_that_is_none_reads_the_ledger_from_its_begin(tmp_path: Path, place: Any) -> None:
    ids = opened(tmp_path, 0)
    ids.durable(1)
    ids.close()
    with contextlib.closing(sqlite3.connect(tmp_path / INDEX)) as db:
        db.execute("drop table read")
        db.execute("create table read (bytes)")
        db.execute("insert into read values (?)", (place,))
        db.commit()
    write(tmp_path, 1, 1)
    expected = set() if place == 2**62 else {ASKED[0]}
    assert trained_among(tmp_path, ASKED) == expected
    assert opened(tmp_path, 1).known(ASKED) == expected


def test_nothing_is_known_where_nothing_is(tmp_path: Path) -> None:
    assert trained_among(tmp_path / "nowhere", ASKED) == set()
    assert opened(tmp_path, 0).known(ASKED) == set()


def test_memory_stays_flat(tmp_path: Path) -> None:
    write(tmp_path, 1, 1000)
    tracemalloc.start()
    ids = opened(tmp_path, 1000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000  # of 100,000 ids
    assert ids.known(["{r}:1-0:0", "{r}:1000-99:0"]) == {"{r}:1-0:0", "{r}:1000-99:0"}


def test_an_index_that_another_process_holds_ends_no_trainer(tmp_path: Path) -> None:
    """It says less than it could until the next checkpoint."""
    write(tmp_path, 1, 2)
    ids = TrainedIds(tmp_path, patience_s=0.05)
    ids.open(1)
    with contextlib.closing(sqlite3.connect(tmp_path / INDEX, isolation_level=None)) as other:
        other.execute("begin exclusive")
        ids.durable(2)
        other.execute("rollback")
    ids.durable(2)
    assert trained_among(tmp_path, ["{r}:2-0:0"]) == {"{r}:2-0:0"}


def test_an_index_that_a_paused_successor_holds_hides_no_id(tmp_path: Path) -> None:
    write(tmp_path, 1, 100)
    ids = TrainedIds(tmp_path, patience_s=0.01)
    ids.open(100, [f"{{r}}:recent-{number}:0" for number in range(5000)])  # more than are held in memory
    asked = [*ASKED, "{r}:recent-4999:0"]
    with contextlib.closing(sqlite3.connect(tmp_path / INDEX, isolation_level=None)) as other:
        other.execute("begin exclusive")
        assert ids.known(asked) == {*ASKED[:3], asked[-1]}
    assert ids.known(asked) == {*ASKED[:3], asked[-1]}
