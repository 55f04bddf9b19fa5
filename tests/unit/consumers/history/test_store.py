"""The writer: what is written twice is there once, and the oldest make room."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.recorder import HistoryStore, TrainedStore
from sluice.consumers.history.records import SequenceFilter, Trained
from sluice.pipeline.errors import DataError
from sluice.pipeline.wire.tokens import TokenArray
from tests.factories import sequence_result
from tests.finished import Finished, FinishedJob, job, row, store

ALL = SequenceFilter()


def jobs_of(directory: Path) -> list[str]:
    return [found.job_id for found in HistoryReader(directory).jobs(limit=1000).rows]


def test_a_repeat_changes_nothing_and_a_second_outcome_is_the_newest_job(tmp_path: Path) -> None:
    writer, reader = store(tmp_path), HistoryReader(tmp_path)
    for name in ("a", "b", "c"):
        writer.record([job(name, size=2)])
    before = reader.sequences(ALL), reader.jobs()
    writer.record([job("a", size=2, at=500.0), job("b", size=2, at=501.0)])
    assert (reader.sequences(ALL), reader.jobs()) == before
    writer.record([job("b", row("b", 0, 2), row("b", 1, 2, state="dropped"), size=2)])
    assert reader.totals() == {"handed_on": 5, "dropped": 1, "dead": 0}
    assert [found.job_id for found in reader.jobs().rows] == ["b", "c", "a"]
    assert [found.seq_id for found in reader.sequences(ALL).rows[:2]] == ["b:1", "b:0"], "a job stays together"


def test_a_job_that_ended_otherwise_is_pruned_whole_and_as_the_newest(tmp_path: Path) -> None:
    writer, reader = store(tmp_path, max_sequences=6), HistoryReader(tmp_path)
    writer.record([job(name, size=2) for name in "abc"])
    writer.record([job("a", row("a", 0, 2), row("a", 1, 2, state="dropped"), size=2)])
    for name, kept in (("d", "dac"), ("e", "eda"), ("f", "fed")):
        writer.record([job(name, size=2)])
        assert "".join(jobs_of(tmp_path)) == kept
        assert [each.job_id for each in reader.sequences(ALL).rows[::2]] == list(kept)


def reused(seq_id: str, job_id: str, **changes: Any) -> FinishedJob:
    """A group of one whose ids an agent chose."""
    return job(job_id, msgspec.structs.replace(row(job_id, **changes), seq_id=seq_id))


@pytest.mark.parametrize("others", range(3))
def test_an_id_that_comes_back_in_another_group_stops_no_pruning(tmp_path: Path, others: int) -> None:
    writer, reader = store(tmp_path, max_sequences=3), HistoryReader(tmp_path)
    writer.record([job(f"before-{number}") for number in range(others)])
    writer.record([reused("x", "first"), reused("x", "second")])
    assert [each.job_id for each in reader.sequences(ALL).rows if each.seq_id == "x"] == ["second"]
    for number in range(9):
        writer.record([job(f"after-{number}")])
        assert sum(reader.totals().values()) <= 3
    assert jobs_of(tmp_path) == ["after-8", "after-7", "after-6"]


@pytest.mark.parametrize("job_id", ["first", "second"])
def test_an_id_that_is_used_again_is_the_newest_sequence(tmp_path: Path, job_id: str) -> None:
    """The newest job too may have its ids used again, and its number isn't given out twice."""
    writer, reader = store(tmp_path), HistoryReader(tmp_path)
    writer.record([reused("x", "first", enqueued_at=1.0), job("other")])
    numbers = set[int]()
    for at in (200.0, 300.0):
        writer.record([reused("x", job_id, enqueued_at=at, at=at)])
        assert [(each.seq_id, each.at) for each in reader.sequences(ALL).rows] == [("x", at), ("other:0", 100.0)]
        assert jobs_of(tmp_path)[0] == job_id
        numbers.update(writer._db.execute("select num from sequences where seq_id = 'x'").fetchone())
    assert len(numbers) == 2
    assert writer._db.execute("select count(*) from details").fetchone() == (2,)


def test_a_clock_that_goes_back_does_not_change_the_order(tmp_path: Path) -> None:
    for at, name in ((100.0, "a"), (50.0, "b")):
        writer = store(tmp_path)
        writer.record([job(name, at=at)])
        writer.close()
    rows = HistoryReader(tmp_path).sequences(ALL).rows
    assert [(each.job_id, each.at) for each in rows] == [("b", 100.0), ("a", 100.0)]


def test_the_oldest_jobs_go_whole_beyond_the_count(tmp_path: Path) -> None:
    writer = store(tmp_path, max_sequences=10)
    for number in range(8):
        writer.record([job(f"g{number}", size=3)])
        assert sum(HistoryReader(tmp_path).totals().values()) == min(9, 3 * (number + 1))
    assert jobs_of(tmp_path) == ["g7", "g6", "g5"]
    writer.close()
    again = store(tmp_path, max_sequences=4)  # a lower limit holds from the next record on
    again.record([job("last")])
    assert jobs_of(tmp_path) == ["last", "g7"]
    again.record([job("big", size=50)])
    assert jobs_of(tmp_path) == ["big"]  # the newest stays, however big


def test_pruning_makes_room_for_more_than_the_next_record(tmp_path: Path) -> None:
    writer, counts = store(tmp_path, max_sequences=320), list[int]()
    for number in range(200):
        writer.record([job(f"g{number}", size=3)])
        counts.append(sum(HistoryReader(tmp_path).totals().values()))
    assert max(counts) <= 320
    assert min(counts[110:]) >= 320 - 10 - 3  # a portion, and what a whole job adds to it
    assert sum(after < before for before, after in pairwise(counts)) <= 200 * 3 // 9
    reader = HistoryReader(tmp_path)
    assert len(jobs_of(tmp_path)) * 3 == counts[-1]
    assert all(reader.sequence(f"{name}:{index}") for name in jobs_of(tmp_path) for index in range(3))


def test_a_file_of_an_earlier_release_is_read_and_written_on(tmp_path: Path) -> None:
    """It has one more index."""
    writer = store(tmp_path)
    writer.record([job("a", size=2), job("a:0"), job("b")])
    writer._db.execute("create index by_job_id on sequences (job_id)")
    writer.close()
    of_a = SequenceFilter(job_id="a", state="handed_on", worker="w")
    reader = HistoryReader(tmp_path)
    assert [each.seq_id for each in reader.sequences(of_a).rows] == ["a:1", "a:0"]
    store(tmp_path).record([job("c")])
    assert [each.seq_id for each in reader.sequences(of_a).rows] == ["a:1", "a:0"]
    assert reader.totals()["handed_on"] == 5


def test_jobs_of_an_earlier_release_are_pruned_with_their_sequences(tmp_path: Path) -> None:
    """They were numbered by themselves."""
    writer = store(tmp_path)
    writer.record([job(name, size=2) for name in "abcd"])
    writer._db.executemany(
        "update jobs set num = ? where job_id = ?", [(at + 1, name) for at, name in enumerate("abcd")]
    )
    writer.close()
    for _ in range(2):
        store(tmp_path).close()
    writer = store(tmp_path, max_sequences=8)
    for name, kept in (("e", "edcb"), ("f", "fedc")):
        writer.record([job(name, size=2)])
        assert "".join(jobs_of(tmp_path)) == kept
        assert [each.job_id for each in HistoryReader(tmp_path).sequences(ALL).rows[::2]] == list(kept)


def test_the_file_does_not_outgrow_its_limit(tmp_path: Path) -> None:
    writer, rng = store(tmp_path, max_mb=1), random.Random(7)

    def noisy(name: str) -> FinishedJob:
        tokens = [rng.randrange(1 << 30) for _ in range(3000)]
        result = sequence_result(name, token_ids=TokenArray(tokens), logprobs=[0.0] * 3000, versions=[0] * 3000)
        return FinishedJob(job_id=name, sequences=[Finished.of(row(name), result, None, None)])

    for number in range(300):  # 3.6 MB
        writer.record([noisy(f"g{number}")])
    writer.close()
    assert (tmp_path / "consumer-0.sqlite").stat().st_size < 1_300_000
    kept = jobs_of(tmp_path)
    assert kept == [f"g{299 - age}" for age in range(len(kept))]
    assert 20 < len(kept) < 100


def test_the_trainers_file_keeps_the_newest_too(tmp_path: Path) -> None:
    writer = TrainedStore(tmp_path / "trainer.sqlite", max_sequences=5)
    consumer = store(tmp_path)
    for number in range(8):
        consumer.record([job(f"g{number}")])
        writer.record([Trained(seq_id=f"g{number}:0", step=number, version=0, state="trained")])
    rows = HistoryReader(tmp_path).sequences(ALL).rows
    assert [each.step for each in rows] == [7, 6, 5, 4, 3, None, None, None]


def test_the_trainers_file_makes_room_for_more_than_the_next_record(tmp_path: Path) -> None:
    writer = TrainedStore(tmp_path / "trainer.sqlite", max_sequences=320)
    count = "select count(*), min(step), max(step) from trained"
    for number in range(1000):
        writer.record([Trained(seq_id=f"g{number}:0", step=number, version=0, state="trained")])
        held, oldest, newest = writer._db.execute(count).fetchone()
        assert (newest, oldest) == (number, number - held + 1)
        assert held == number + 1 if number < 320 else 310 <= held <= 320


def test_a_call_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    writer = store(tmp_path)
    writer.record([job("a")])
    bad = msgspec.structs.replace(row("b", 1, 2), worker=object())  # no text for the file
    with pytest.raises(Exception, match="type 'object'"):
        writer.record([job("b", row("b", 0, 2), bad, size=2)])
    writer.record([job("c")])
    assert jobs_of(tmp_path) == ["c", "a"]
    assert HistoryReader(tmp_path).totals()["handed_on"] == 2


def test_files_may_be_missing_empty_or_made_anew(tmp_path: Path) -> None:
    reader = HistoryReader(tmp_path / "history")
    assert reader.sequences(ALL).rows == []
    assert reader.choices()["worker"] == []
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "consumer-0.sqlite").touch()
    assert reader.totals() == {"handed_on": 0, "dropped": 0, "dead": 0}
    (tmp_path / "history" / "consumer-0.sqlite").unlink()
    for name in ("first", "second"):
        writer = store(tmp_path / "history")
        writer.record([job(name)])
        writer.close()
        assert [each.job_id for each in reader.sequences(ALL).rows] == [name]
        (tmp_path / "history" / "consumer-0.sqlite").rename(tmp_path / name)


def test_a_file_of_another_schema_or_of_none_is_named(tmp_path: Path) -> None:
    writer = store(tmp_path)
    writer._db.execute("pragma user_version=9")
    writer.close()
    for look in (lambda: HistoryReader(tmp_path).totals(), lambda: store(tmp_path)):
        with pytest.raises(DataError, match=r"consumer-0\.sqlite: history of schema 9; this release .* 1: use"):
            look()
    (tmp_path / "consumer-0.sqlite").write_bytes(os.urandom(5000))
    with pytest.raises(DataError, match=r"consumer-0\.sqlite: cannot be read as a history"):
        HistoryReader(tmp_path).totals()


def test_two_writers_of_one_file_do_not_harm_it(tmp_path: Path) -> None:
    """A consumer that was replaced and does not know it yet."""
    one, other = store(tmp_path), HistoryStore(tmp_path / "consumer-0.sqlite")
    for number in range(5):
        one.record([job(f"a{number}")])
        other.record([job(f"a{number}"), job(f"b{number}")])
    assert HistoryReader(tmp_path).totals()["handed_on"] == 10
