"""Page after page, while others write: nothing twice, nothing left out."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceFilter
from tests.deadlines import HANG_S
from tests.finished import job, row, store

WRITES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.sampled_from(["x", "y"])), max_size=12)


def walk(reader: HistoryReader, wanted: SequenceFilter, limit: int) -> Iterator[list[str]]:
    before = ""
    while True:
        page = reader.sequences(wanted, limit, before)
        yield [each.seq_id for each in page.rows]
        if not page.next:
            return
        before = page.next


@settings(max_examples=40, deadline=None)
@given(first=WRITES, later=st.lists(WRITES, max_size=5), limit=st.integers(1, 5), worker=st.sampled_from(["", "x"]))
def test_pages_show_what_was_there_at_the_first_once_and_in_order(
    first: list[tuple[int, int, str]], later: list[list[tuple[int, int, str]]], limit: int, worker: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory, number, there = Path(name), 0, list[str]()
        stores = {}

        def write(writes: list[tuple[int, int, str]]) -> Iterator[str]:
            nonlocal number
            for partition, size, by in writes:
                number += 1
                if partition not in stores:
                    stores[partition] = store(directory, partition)
                rows = [row(f"g{number}", i, size, at=float(number), worker=by) for i in range(size)]
                stores[partition].record([job(f"g{number}", *rows, size=size)])
                yield from (each.seq_id for each in rows if worker in ("", by))

        there = list(write(first))
        reader, seen, waves = HistoryReader(directory), list[str](), iter(later)
        for page in walk(reader, SequenceFilter(worker=worker), limit):
            seen += page
            list(write(next(waves, [])))
        reader.close()
        for each in stores.values():
            each.close()
        assert seen == there[::-1]


def test_a_reader_in_other_threads_sees_whole_groups_while_two_write(tmp_path: Path) -> None:
    """Every group has three members, and each was written at once."""
    done, torn = threading.Event(), list[str]()
    reader = HistoryReader(tmp_path)

    def read() -> None:
        while not done.is_set():
            for page in walk(reader, SequenceFilter(), 7):
                if len(page) != len(set(page)):
                    torn.append("repeated")
            if reader.totals()["handed_on"] % 3:
                torn.append("half a group")

    def write(partition: int) -> None:
        writer = store(tmp_path, partition, max_sequences=90)
        for number in range(150):
            writer.record([job(f"{partition}-{number}", size=3)])
        writer.close()

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(partition,)) for partition in range(2)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join(HANG_S)
    done.set()
    for thread in readers:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert torn == []
    assert reader.totals()["handed_on"] == 180
