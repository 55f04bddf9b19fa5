"""What a kill cost is counted from the jobs' logs and the stored sequences, as a consumer recorded them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.history.files import TRAINER
from sluice.consumers.history.recorder import Finished, FinishedJob, TrainedStore
from sluice.consumers.history.records import Trained
from sluice.demo.kill_cost import Kill, kill_cost
from sluice.demo.report import kill_picture
from tests.factories import sequence_result
from tests.finished import row, store

_START = 1_700_000_000.0
KILL = Kill("worker-1", pid=7, at=_START + 10.0, at_s=10.0, running=2)


def log(*events: tuple[float, str, int, str]) -> bytes:
    """Events (seconds after the start, letter, attempt, worker) as the Lua scripts write them."""
    return "".join(
        f"{(_START + at) * 1000:.0f}\t{kind}\t{number}\t{who}\t\n" for at, kind, number, who in events
    ).encode()


def ended(job_id: str, *events: tuple[float, str, int, str], **changes: Any) -> FinishedJob:
    """A group of one; `resumed` tokens of its result came from storage."""
    resumed = changes.pop("resumed", 0)
    fields: dict[str, Any] = {"at": _START + 20.0, "worker": "worker-0", "new_tokens": 3, **changes}
    sequence = Finished.of(row(job_id, **fields), sequence_result(job_id, resumed_tokens=resumed), None, None)
    return FinishedJob(job_id=job_id, sequences=[sequence], log=log((1.0, "e", 0, ""), *events))


def taken_over(job_id: str, again_at: float, *, kind: str = "l", **changes: Any) -> FinishedJob:
    """A job that the killed worker held from 9 s on, and worker-0 from `again_at` to 12 s."""
    events = ((9.0, "c", 1, "worker-1"), (10.5, kind, 1, "worker-1"))
    return ended(job_id, *events, (again_at, "c", 2, "worker-0"), (12.0, "x", 2, "worker-0"), attempt=2, **changes)


def paced(job_id: str) -> FinishedJob:
    """A job that the worker had finished before, at two tokens a second."""
    times: dict[str, Any] = {"enqueued_at": _START + 1.0, "queue_s": 1.0, "decode_s": 2.0, "at": _START + 4.0}
    events = ((2.0, "c", 1, "worker-1"), (4.0, "x", 1, "worker-1"))
    return ended(job_id, *events, worker="worker-1", new_tokens=4, attempt=1, **times)


def test_every_job_that_the_worker_held_is_counted_with_its_wait(tmp_path: Path) -> None:
    store(tmp_path).record([paced("p"), taken_over("a", 10.6), taken_over("b", 11.4, kind="h"), taken_over("c", 11.0)])
    cost = kill_cost(tmp_path, KILL)
    assert [job.job_id for job in cost.jobs] == ["a", "c", "b"]
    assert cost.waits_s == pytest.approx([0.6, 1.0, 1.4])
    assert (cost.wait_s, cost.workers, cost.sequences) == (pytest.approx(1.0), ["worker-0"], 3)


def test_jobs_of_other_workers_and_of_other_times_are_left_out(tmp_path: Path) -> None:
    calm = ended("calm", (2.0, "c", 1, "worker-1"), (3.0, "x", 1, "worker-1"), attempt=1)
    other = ended("other", (9.0, "c", 1, "worker-0"), (10.5, "l", 1, "worker-0"), (11.0, "c", 2, "worker-1"), attempt=2)
    early = ended("early", (2.0, "c", 1, "worker-1"), (3.0, "h", 1, "worker-1"), (9.5, "c", 2, "worker-0"), attempt=2)
    late = ended("late", (11.0, "c", 1, "worker-1"), (13.0, "h", 1, "worker-1"), (14.0, "c", 2, "worker-0"), attempt=2)
    store(tmp_path).record([calm, other, early, late])
    cost = kill_cost(tmp_path, KILL)
    assert (list(cost.jobs), cost.sequences, cost.decoded_again) == ([], 0, 0)
    assert (cost.waits_s, cost.wait_s, kill_picture(cost)) == ([], 0.0, None)


def test_tokens_from_storage_are_not_decoded_again(tmp_path: Path) -> None:
    store(tmp_path).record([taken_over("a", 10.6, new_tokens=8, resumed=3), taken_over("b", 10.6, new_tokens=2)])
    cost = kill_cost(tmp_path, KILL)
    assert (cost.decoded_again, cost.restored) == (5 + 2, 3)


def test_what_was_decoded_twice_is_the_pace_times_the_time_and_no_more_than_was_decoded_again(tmp_path: Path) -> None:
    """One second at two tokens a second, of which storage kept one for `b`; `c` is shorter than that."""
    jobs = [taken_over("a", 10.6, new_tokens=8), taken_over("b", 10.6, new_tokens=8, resumed=1)]
    store(tmp_path).record([paced("p"), *jobs, taken_over("c", 10.6, new_tokens=1)])
    assert kill_cost(tmp_path, KILL).decoded_twice == 2 + 1 + 1


def test_ends_come_from_the_trainer_where_it_has_the_sequence(tmp_path: Path) -> None:
    store(tmp_path).record([taken_over(name, 10.6) for name in "abc"] + [taken_over("d", 10.6, state="dead")])
    trainer = TrainedStore(tmp_path / TRAINER)
    trainer.record(
        [
            Trained(seq_id="a:0", step=1, version=0, state="trained"),
            Trained(seq_id="b:0", step=1, version=0, state="dropped", reason="stale"),
        ]
    )
    cost = kill_cost(tmp_path, KILL)
    assert (cost.sequences, cost.trained, cost.others) == (4, 1, {"dropped": 1, "handed_on": 1, "dead": 1})


def test_sequences_of_a_group_that_ended_before_the_kill_are_not_part_of_its_cost(tmp_path: Path) -> None:
    events = ((9.0, "c", 1, "worker-1"), (10.5, "l", 1, "worker-1"), (10.6, "c", 2, "worker-0"))
    rows = [row("g", index, 2, attempt=index + 1, new_tokens=5, at=_START + 20.0) for index in range(2)]
    store(tmp_path).record([FinishedJob(job_id="g", sequences=[Finished(row=one) for one in rows], log=log(*events))])
    cost = kill_cost(tmp_path, KILL)
    assert (len(cost.jobs), cost.sequences, cost.decoded_again) == (1, 1, 5)


def test_a_directory_without_a_history_has_no_cost(tmp_path: Path) -> None:
    assert list(kill_cost(tmp_path, KILL).jobs) == []


def test_the_picture_has_a_row_per_job_and_labels_at_equal_parts_of_its_width(tmp_path: Path) -> None:
    store(tmp_path).record([taken_over("a", 10.5), taken_over("b", 11.0)])
    picture = kill_picture(kill_cost(tmp_path, KILL))
    assert picture is not None
    assert picture.labels == ["−1 s", "−0.5 s", "kill", "+0.5 s", "+1 s", "+1.5 s"]  # from 9 s to 12 s
    assert picture.kill_x == pytest.approx(1000 / 3, abs=0.1)
    first, second = picture.rows
    assert (first["x"], first["died"]) == (0.0, pytest.approx(333.3))
    assert (first["began"], first["again"]) == (pytest.approx(500.0), pytest.approx(500.0))
    assert second["began"] == pytest.approx(666.7)
    assert second["y"] > first["y"]


def test_why_a_kill_cost_no_training_rollout(tmp_path: Path) -> None:
    assert "committed all its jobs" in kill_cost(tmp_path, KILL).kill.why_free
    heldout = replace(KILL, heldout=84)
    assert "it held no training rollout; 84 held-out prompts were in" in kill_cost(tmp_path, heldout).kill.why_free
