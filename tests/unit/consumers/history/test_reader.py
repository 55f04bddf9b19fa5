"""What is written is found again: by every filter, as a whole, per job, in all files of a run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from sluice.consumers.history.reader import HistoryReader, conditions
from sluice.consumers.history.recorder import TrainedStore
from sluice.consumers.history.records import SequenceFilter, Trained
from sluice.pipeline.errors import DataError
from sluice.pipeline.wire.messages import DeadLetter, RolloutHead
from sluice.pipeline.wire.tokens import FloatArray, Runs
from tests.factories import sequence_result, training_sample
from tests.finished import Finished, FinishedJob, job, row, store, whole


def ids(reader: HistoryReader, **wanted: object) -> list[str]:
    return [each.seq_id for each in reader.sequences(SequenceFilter(**wanted)).rows]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> HistoryReader:
    """Two files: `a` and `c` in one, `b` in the other."""
    directory = tmp_path_factory.mktemp("history")
    even, odd = store(directory, 0), store(directory, 1)
    mixed = [
        row("a", 0, 2, at=1.0, worker="w1", version_min=1, version_max=3, enqueued_at=0.5),
        row("a", 1, 2, at=1.0, worker="w2", finish_reason="length", version_min=5, version_max=5, attempt=2),
    ]
    even.record([job("a", *mixed, log=b"500\te\t0\t\t\n700\tc\t1\tw1\t\n")])
    odd.record([job("b", row("b", at=2.0, state="dropped", reason="too_long", task="other", triggered=True))])
    even.record([job("c", row("c", at=3.0, state="dead", reason="expired", worker="", task="", finish_reason=""))])
    even.close()
    odd.close()
    return HistoryReader(directory)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, ["c:0", "b:0", "a:1", "a:0"]),
        ({"state": "handed_on"}, ["a:1", "a:0"]),
        ({"state": "dead"}, ["c:0"]),
        ({"finish_reason": "length"}, ["a:1"]),
        ({"worker": "w1"}, ["a:0"]),
        ({"task": "other"}, ["b:0"]),
        ({"version": 2}, ["a:0"]),
        ({"version": 4}, []),
        ({"triggered": True}, ["b:0"]),
        ({"triggered": False, "state": "dead"}, ["c:0"]),
        ({"job_id": "a"}, ["a:1", "a:0"]),
        ({"search": ":1"}, ["a:1"]),
        ({"search": "a", "worker": "w2"}, ["a:1"]),
        ({"search": "%"}, []),
    ],
)
def test_every_filter_finds_what_fits_and_nothing_else(
    wanted: dict[str, object], found: list[str], reader: HistoryReader
) -> None:
    assert ids(reader, **wanted) == found


def test_menus_and_totals_cover_all_files(reader: HistoryReader) -> None:
    assert reader.choices() == {
        "worker": ["w", "w1", "w2"],
        "task": ["other", "t"],
        "finish_reason": ["length", "stop"],
        "state": ["dead", "dropped", "handed_on"],
    }
    assert reader.totals() == {"handed_on": 2, "dropped": 1, "dead": 1}


def test_a_job_has_its_counts_and_its_events(reader: HistoryReader) -> None:
    assert [found.job_id for found in reader.jobs().rows] == ["c", "b", "a"]
    assert [found.job_id for found in reader.jobs("b").rows] == ["b"]
    found = reader.job("a")
    assert found is not None
    assert (found.states, found.sequences, found.group_size, found.attempts) == ({"handed_on": 2}, 2, 2, 2)
    assert (found.task, found.enqueued_at, found.at) == ("t", 0.5, 1.0)
    assert [(event.kind, event.worker) for event in found.events] == [("enqueued", ""), ("claimed", "w1")]
    assert reader.job("none") is None


def test_a_rollout_that_no_producer_announced_is_found_by_its_job(tmp_path: Path) -> None:
    writer, head = store(tmp_path), RolloutHead.alone("a", "t")
    parts = [msgspec.structs.replace(row(head.group_id), seq_id=seq_id) for seq_id in ("a", "a/1", "a/2")]
    neighbours = [job(job_id, row(job_id)) for job_id in ("a0", "a9", "a/1", "aa", "A")]
    writer.record([job(head.group_id, *parts), *neighbours])
    reader = HistoryReader(tmp_path)
    assert ids(reader, job_id="a") == ["a/2", "a/1", "a"]
    assert ids(reader, job_id="a", worker="w", search="/") == ["a/2", "a/1"]


def test_the_sequences_of_a_job_are_found_without_a_scan(tmp_path: Path) -> None:
    store(tmp_path).close()
    where, args = conditions(SequenceFilter(job_id="a", worker="w"))
    with closing(sqlite3.connect(tmp_path / "consumer-0.sqlite")) as db:
        plan = [step[3] for step in db.execute(f"explain query plan select num from sequences where true{where}", args)]
    assert any("seq_id" in step for step in plan)
    assert not [step for step in plan if step.startswith("SCAN")]


def test_a_sequence_comes_back_whole_with_what_the_trainer_did(tmp_path: Path) -> None:
    writer, trainer = store(tmp_path), TrainedStore(tmp_path / "trainer.sqlite")
    letter = DeadLetter(seq_id="d:0", reason="expired")
    writer.record([whole("a"), whole("b")])
    dead = Finished.of(row("d", state="dead"), None, None, letter)
    writer.record([FinishedJob(job_id="d", sequences=[dead])])
    trained = Trained(
        seq_id="a:0",
        step=7,
        version=6,
        state="trained",
        proximal_logprobs=FloatArray([0, -0.5, -1, -1.5]),
        proximal_versions=Runs.of([-1, 6, 6, 6]),
    )
    trainer.record([trained, Trained(seq_id="b:0", step=7, version=6, state="dropped", reason="stale")])
    reader = HistoryReader(tmp_path)
    found = reader.sequence("a:0")
    assert found is not None
    assert (found.result, found.sample) == (sequence_result("a"), training_sample("a:0"))
    assert found.trained == trained
    assert (found.row.step, found.row.trained) == (7, "trained")
    rows = reader.sequences(SequenceFilter()).rows
    assert [(each.seq_id, each.step, each.trained) for each in rows] == [
        ("d:0", None, None),
        ("b:0", 7, "dropped"),
        ("a:0", 7, "trained"),
    ]
    dead_one = reader.sequence("d:0")
    assert dead_one is not None
    assert (dead_one.letter, dead_one.result) == (letter, None)
    assert reader.sequence("none") is None


def test_what_was_handed_on_comes_oldest_first_from_all_files(tmp_path: Path) -> None:
    writers = [store(tmp_path, 0), store(tmp_path, 1)]
    for number in range(9):
        state = "dropped" if number == 4 else "handed_on"
        writers[number % 2].record([whole(f"g{number}", at=float(number), state=state)])
    found = list(HistoryReader(tmp_path).handed_on(batch=2))
    assert [each.row.job_id for each in found] == [f"g{number}" for number in range(9) if number != 4]
    assert all(each.sample is not None for each in found)


@pytest.mark.parametrize("before", ["junk", "consumer-0_x", "consumer-0_99999999999999999999", "_-1"])
def test_a_cursor_that_is_none_is_refused(before: str, reader: HistoryReader) -> None:
    with pytest.raises(DataError, match="not a position in the list"):
        reader.sequences(SequenceFilter(), before=before)
