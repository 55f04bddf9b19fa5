"""What the processes and the queue did over time: bounded, exact about lives, kept in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from sluice.consumers.dashboard import timeline
from sluice.consumers.dashboard.timeline import MOODS, MOST, Timeline, mood, rates, state_of
from sluice.pipeline.status.snapshot import Depth, Process, Snapshot
from sluice.pipeline.wire.waits import Wait, WaitKind


def row(at: float, name: str = "worker-0", *, started: float = 0.0, **more: Any) -> Process:
    role = name.partition("-")[0]
    return Process(role=role, name=name, pid=1, host="h", started=started, at=at, **more)


def look(at: float, *processes: Process, **more: Any) -> Snapshot:
    return Snapshot(run="r", state="running", at=at, processes=list(processes), **more)


def waiting(kind: WaitKind) -> Wait:
    return Wait(kind=kind, since=0.0)


@pytest.fixture
def seen(tmp_path: Path) -> Timeline:
    return Timeline(tmp_path)


def test_every_wait_is_of_one_kind_and_the_unknown_is_held_back() -> None:
    moods = {kind: mood(kind.value) for kind in WaitKind}
    assert set(moods.values()) == set(MOODS) - {"working"}
    assert set(timeline._MOODS) == {"working", "failed", "silent", *WaitKind}
    assert mood("of a later release") == "held"
    assert set(get_args(timeline.Mood)) == set(MOODS)


@pytest.mark.parametrize(
    ("process", "state"),
    [
        (row(1.0), "working"),
        (row(1.0, wait=waiting(WaitKind.CREDIT)), "credit"),
        (row(1.0, age_s=9.0), "silent"),
        (row(1.0, ended_at=1.0, error="no", error_kind="ModelError"), "failed"),
    ],
)
def test_a_process_is_in_one_state(process: Process, state: str) -> None:
    assert state_of(process) == state


def test_a_long_run_stays_whole_in_a_bounded_number_of_bins(seen: Timeline) -> None:
    for at in range(3 * MOST):
        seen.add(look(1000.0 + at, row(1000.0 + at, facts={"tokens": 10 * at, "cpu_ms": 500 * at, "memory_bytes": 7})))
    assert MOST / 2 <= len(seen.bins) <= MOST
    assert (seen.bins[0].at, seen.bins[-1].until) == (1000.0, 1000.0 + 3 * MOST - 1)
    assert sum(one.looks for one in seen.bins) == 3 * MOST
    assert seen.interval_s == 4.0
    track = seen.tracks()["worker-0"]
    assert track.shares == [("working", 1.0)]
    assert track.rate is not None
    assert (track.rate.last, track.rate.most) == (pytest.approx(10.0), pytest.approx(10.0))
    assert track.cpu is not None
    assert track.cpu.last == pytest.approx(50.0)
    assert track.memory is not None
    assert track.memory.last == 7
    assert track.paths == {"working": "M0 0h1000"}


def test_an_old_snapshot_is_ignored(seen: Timeline) -> None:
    seen.add(look(10.0, row(10.0)))
    seen.add(look(10.0, row(10.0)))
    seen.add(look(9.0, row(9.0)))
    assert [one.looks for one in seen.bins] == [1]


def test_waits_and_their_causes_are_told_apart(seen: Timeline) -> None:
    for at in range(100):
        wait = None if at < 50 else waiting(WaitKind.CREDIT if at < 90 else WaitKind.WEIGHTS)
        seen.add(look(1000.0 + at, row(1000.0 + at, wait=wait)))
    track = seen.tracks()["worker-0"]
    assert track.shares == [("working", 0.5), ("credit", 0.4), ("weights", 0.1)]
    assert list(track.paths) == ["working", "held", "loading"]
    assert track.paths["working"] == "M0 0h505"


def test_a_short_death_is_seen_in_a_long_bin(seen: Timeline) -> None:
    for at in range(8 * MOST):
        seen.add(look(1000.0 + at, row(1000.0 + at, age_s=7.0 if at == 5 * MOST else 0.0)))
    assert "trouble" in seen.tracks()["worker-0"].paths


def test_a_restart_is_another_life_and_a_rate_starts_over(seen: Timeline) -> None:
    for at in range(20):
        facts = {"tokens": 100 * at if at < 10 else 5 * (at - 10)}
        error = {"ended_at": 1009.0, "error": "boom", "error_kind": "EngineError"} if at == 9 else {}
        started = 900.0 if at < 10 else 1010.0
        seen.add(look(1000.0 + at, row(1000.0 + at, started=started, facts=facts, **error)))
    first, second = seen.lives
    assert (first.ended, first.error, first.last) == ("failed", "EngineError: boom", 1009.0)
    assert (second.ended, second.started) == ("", 1010.0)
    track = seen.tracks()["worker-0"]
    assert track.starts == [pytest.approx(10 / 19 * 1000, abs=0.1)]
    assert track.rate is not None
    assert track.rate.last == pytest.approx(5.0), "not negative, and not across the restart"


def test_a_killed_process_died_and_one_that_left_ended(seen: Timeline) -> None:
    seen.add(look(10.0, row(10.0, started=1.0), row(10.0, "consumer-0", started=1.0)))
    seen.add(look(11.0, row(11.0, started=10.5)))  # another pid has its name; the consumer said goodbye
    ended = {(life.name, life.started): life.ended for life in seen.lives}
    assert ended == {("worker-0", 1.0): "silent", ("worker-0", 10.5): "", ("consumer-0", 1.0): "cleanly"}


def test_the_living_are_never_forgotten_and_the_last_to_end_are_kept(seen: Timeline) -> None:
    many = timeline._MOST_LIVES + 50

    def living(at: float, started: float) -> list[Process]:
        return [row(at, f"worker-{number}", started=started) for number in range(many)]

    seen.add(look(10.0, *living(10.0, 1.0)))
    seen.add(look(11.0, *living(11.0, 10.5)))  # all of them have been restarted
    assert sum(not life.ended for life in seen.lives) == many
    assert len(seen.lives) == many + timeline._MOST_LIVES
    assert sum(len(track.lives) for track in seen.tracks().values()) == len(seen.lives)


def test_a_name_is_drawn_as_long_as_a_life_of_it_is_known(tmp_path: Path, seen: Timeline) -> None:
    times = range(1000, 1000 + 2 * timeline._MOST_LIVES)
    for at in times:  # each lives for one look
        seen.add(look(at, row(at, "worker-0"), row(at, f"trainer-{at}")))
    known = {life.name for life in seen.lives}
    assert len(known) <= timeline._MOST_LIVES + 2
    assert {"worker-0", f"trainer-{times[-1]}"} < known, "the newest, and who still lives"
    assert {name for one in seen.bins for name in one.processes} == set(seen.tracks()) == known
    assert seen.tracks()["worker-0"].paths == {"working": "M0 0h1000"}
    seen.lives = seen.lives[:1]
    seen.save()
    assert set(Timeline(tmp_path).tracks()) == {"worker-0"}, "a file of an older release may have more"


def test_what_a_reader_took_does_not_change(seen: Timeline) -> None:
    seen.add(look(1000.0, row(1000.0)))
    bins, lives = seen.bins, seen.lives
    for at in range(1, 2 * MOST):
        seen.add(look(1000.0 + at))
    assert (len(bins), bins[0].looks, list(bins[0].processes)) == (1, 1, ["worker-0"])
    assert [life.ended for life in lives] == [""]


def test_it_is_kept_and_continued(tmp_path: Path, seen: Timeline) -> None:
    seen.add(look(10.0, row(10.0, facts={"tokens": 5})))
    seen.save()
    again = Timeline(tmp_path)
    assert (again.bins, again.lives) == (seen.bins, seen.lives)
    again.add(look(11.0, row(11.0)))
    assert len(again.bins) == 2
    assert Timeline(tmp_path / "none").bins == []
    Timeline(tmp_path / "none").save()
    assert not (tmp_path / "none").exists(), "only a run that keeps a history has the directory"


@pytest.mark.parametrize("content", [b"", b"{", b'{"bins": [[1]], "lives": []}', b"\xff\xfe", b'{"bins": 3}'])
def test_a_damaged_file_begins_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / timeline.NAME).write_bytes(content)
    seen = Timeline(tmp_path)
    seen.add(look(10.0, row(10.0)))
    assert len(seen.bins) == 1


def test_a_resumed_run_is_drawn_alone_and_the_pause_costs_no_bins(seen: Timeline) -> None:
    for at in range(50):
        seen.add(look(1000.0 + at, row(1000.0 + at)))
    for at in range(MOST + 1):
        seen.add(look(90_000.0 + at, row(90_000.0 + at)))
    assert seen.sitting()[0].at == 90_000.0
    assert len(seen.bins) <= MOST
    assert seen.bins[0].at == 1000.0


def test_a_clock_that_steps_back_begins_another_sitting(seen: Timeline) -> None:
    for at in (1000.0, 1001.0, 500.0, 501.0, 502.0):
        seen.add(look(at, row(at)))
    assert [(one.at, one.until) for one in seen.sitting()] == [(500.0, 500.0), (501.0, 501.0), (502.0, 502.0)]
    for at in range(503, 503 + MOST):
        seen.add(look(at, row(at)))
    assert len(seen.bins) <= MOST
    assert [one.at for one in seen.bins if one.at >= 1000.0] == [1000.0], "neither lost nor joined with the others"
    assert seen.sitting()[0].at == 500.0
    assert all(one.at <= one.until for one in seen.bins)


def test_a_resumed_run_does_not_join_a_long_bin_of_the_one_before(seen: Timeline) -> None:
    day = 24 * 3600.0
    for at in range(0, int(5 * day), 600):
        seen.add(look(1000.0 + at, row(1000.0 + at)))
    assert seen.interval_s > timeline._PAUSE_S
    resumed = seen.bins[-1].until + timeline._PAUSE_S + 1
    seen.add(look(resumed, row(resumed)))
    assert [one.at for one in seen.sitting()] == [resumed]


def test_a_look_without_the_queue_does_not_empty_a_bin(seen: Timeline) -> None:
    for at in range(2 * MOST):
        seen.add(look(1000.0 + at, depth=None if at % 2 else Depth(ready=8, running=4, oldest_s=1.5)))
    queue, oldest, ended = seen.charts()
    assert {one.name: set(one.values) for one in queue.lines} == {"waiting": {8.0}, "held by a worker": {4.0}}
    assert set(oldest.lines[0].values) == {1.5}
    assert len(ended.lines[0].values) == len(seen.bins)


def test_bins_of_before_they_counted_looks_at_the_queue_are_means(tmp_path: Path) -> None:
    old = [[at, at + 1.0, 2, {"ready": 8}, 1.5, {}, {}] for at in (10.0, 12.0)]
    (tmp_path / timeline.NAME).write_bytes(msgspec.json.encode({"bins": old, "lives": []}))
    seen = Timeline(tmp_path)
    assert seen.charts()[0].lines[0].values == [4.0, 4.0]
    assert seen.bins[0].joined(seen.bins[1]).mean("ready") == 4.0


def test_more_pauses_than_bins_drop_the_oldest(seen: Timeline) -> None:
    for at in range(MOST + 5):
        seen.add(look(10_000.0 * (at + 1), row(10_000.0 * (at + 1))))
    assert len(seen.bins) == MOST


def test_jobs_are_drawn_as_means_and_only_states_that_came(seen: Timeline) -> None:
    assert seen.charts() == []
    for at in range(2 * MOST):
        depth = Depth(ready=at % 2 * 10, running=4, oldest_s=1.5)
        seen.add(look(1000.0 + at, depth=depth, redelivered_jobs=at, dead=1, dropped=0))
    queue, oldest, ended = seen.charts()
    assert [one.name for one in queue.lines] == ["waiting", "held by a worker"]
    assert queue.lines[0].values[0] == 5.0
    assert all(3 < value < 7 for value in queue.lines[0].values[:-1]), "a bin has the mean, not the last look"
    assert set(oldest.lines[0].values) == {1.5}
    assert [one.values[-1] for one in ended.lines] == [2 * MOST - 1, 1, 0]
    assert queue.lines[0].at == sorted(queue.lines[0].at)


def test_a_rate_is_counted_over_a_few_seconds() -> None:
    assert rates([(0.0, 1.0, 0), (1.0, 1.0, 30), (2.0, 1.0, 30), (3.0, 1.0, 60)]) == [(1.0, 30), (2.0, 15), (3.0, 20)]
    assert rates([(0.0, 1.0, 0), (0.0, 1.0, 9), (1.0, 1.0, None)]) == [], "the same heartbeat, and none"
    assert rates([(0.0, 1.0, 50), (1.0, 1.0, 5), (2.0, 1.0, 7)]) == [(2.0, 2)], "a count that went down"
