"""What the pages of processes and jobs say: ended and restarted processes, what is held, how long it took."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice.consumers.dashboard.app import make_app
from sluice.consumers.dashboard.jobs import distribution, held_bars
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.dashboard.render import Live, fragment
from sluice.consumers.dashboard.timeline import Timeline, Track
from sluice.consumers.dashboard.workers import _parts
from sluice.consumers.history.indexing import LEAST_S, bucket
from sluice.consumers.history.reader import HistoryReader
from sluice.pipeline.config.types import Config
from sluice.pipeline.status.snapshot import Depth, Holder, Process, Snapshot
from sluice.pipeline.wire.waits import Wait, WaitKind


def row(name: str, at: float, **more: Any) -> Process:
    more = {"started": 1000.0, **more}
    return Process(role=name.partition("-")[0], name=name, pid=1, host="h", at=at, **more)


@pytest.fixture
def monitor(tmp_path: Path) -> Monitor:
    return Monitor(Config(run_dir=str(tmp_path)), Redis(), HistoryReader(tmp_path))


def show(monitor: Monitor, at: float, *rows: Process, **more: Any) -> None:
    monitor.newest = Snapshot(run="r", state="running", at=at, processes=list(rows), **more)
    monitor.timeline.add(monitor.newest)
    monitor.number += 1


def test_a_process_that_left_or_died_stays_on_the_page(monitor: Monitor) -> None:
    error = {"ended_at": 1008.0, "error": "<no room>", "error_kind": "OSError"}
    for at in range(1001, 1009):
        tokens = {"tokens": 10 * at, "running": 2, "cpu_ms": 400 * at, "memory_bytes": 2 << 20, "version": 7}
        last = error if at == 1008 else {}
        credit = Wait(kind=WaitKind.CREDIT, since=1000.0)
        rows = [row("worker-0", at, facts=tokens), row("producer-0", at, wait=credit), row("consumer-0", at, **last)]
        show(monitor, float(at), *rows, holders=[Holder(worker="worker-0", jobs=3, sequences=6)])
    lines = {line.name: line for line in _parts(monitor)["lines"]}
    assert [(name, line.state) for name, line in lines.items()] == [
        ("producer-0", "waiting"), ("worker-0", "working"), ("consumer-0", "failed"),
    ]  # fmt: skip
    assert lines["worker-0"].holds == "3 jobs, 2 running"
    assert lines["consumer-0"].says == "OSError: <no room>"
    assert lines["producer-0"].says.startswith("credit")
    page = Live(monitor).render("workers")
    for words in ("40 %", "2.0 MiB", ">v7<", "10.0 <small>tok/s", "OSError: &lt;no room&gt;", "m-trouble", "m-held"):
        assert words in page, words

    show(monitor, 1010.0)  # all are gone
    lines = {line.name: line for line in _parts(monitor)["lines"]}
    assert {name: line.state for name, line in lines.items()} == {
        "producer-0": "ended", "worker-0": "ended", "consumer-0": "failed",
    }  # fmt: skip
    assert lines["consumer-0"].says == "OSError: <no room>", "why it failed is kept"
    assert "at most</small> 10.0" in Live(monitor).render("workers")


@pytest.mark.parametrize("last", [{"ended_at": 1030.0, "error": "no", "error_kind": "OSError"}, {"age_s": 20.0}])
def test_the_last_figures_of_one_that_failed_or_is_silent_are_not_told_as_current(
    monitor: Monitor, last: dict[str, Any]
) -> None:
    for at in range(1001, 1011):
        facts = {"tokens": 10 * at, "running": 2, "cpu_ms": 400 * at, "memory_bytes": 2 << 20, "version": 7}
        show(monitor, float(at), row("worker-0", at, facts=facts, **(last if at == 1010 else {})))
    page = " ".join(Live(monitor).render("workers").split("<details")[0].split())
    for words in ("at most</small> 10.0 <small>tok/s", "at most</small> 40 %", "at most</small> 2.0 MiB"):
        assert words in page, words
    assert ">v7<" not in page
    assert "2 running" not in page


def test_a_restart_is_counted_and_its_time_is_marked(monitor: Monitor) -> None:
    for at in range(1001, 1021):
        show(monitor, float(at), row("worker-0", at, started=1000.0 if at < 1010 else 1009.5))
    [line] = _parts(monitor)["lines"]
    assert line.restarts == 1
    page = Live(monitor).render("workers")
    assert 'class="start"' in page
    assert "<b>1</b><small>last" in page


def test_nothing_seen_says_what_to_start(monitor: Monitor) -> None:
    page = Live(monitor).render("workers")
    assert "<code>sluice up -c CONFIG</code>" in page


def test_held_bars_share_one_scale_and_name_idle_workers() -> None:
    rows = [row("worker-1", 999.0), row("worker-2", 999.0), row("worker-3", 900.0, age_s=100.0)]
    held = [Holder(worker="worker-0", jobs=8, retried=2), Holder(worker="worker-1", jobs=4)]
    bars = held_bars(Snapshot(run="r", state="running", processes=rows, holders=held))
    assert [(bar.holder.worker, bar.first, bar.retried) for bar in bars] == [
        ("worker-0", 750.0, 250.0), ("worker-1", 500.0, 0.0), ("worker-2", 0.0, 0.0),
    ]  # fmt: skip
    assert held_bars(Snapshot(run="r", state="new")) == []


def test_what_is_held_says_that_only_the_first_jobs_were_looked_at(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    rows, held = [row("worker-0", 999.0), row("worker-1", 999.0)], [Holder(worker="worker-0", jobs=8, sequences=8)]

    def pages(depth: Depth) -> tuple[str, str]:
        show(monitor, monitor.number + 999.0, *rows, holders=held, depth=depth)
        bars = held_bars(monitor.newest)
        return fragment(monitor, "jobs_held.html.j2", bars=bars, axis=1000), Live(monitor).render("workers")

    jobs, processes = pages(Depth(seen_all=False))
    assert "of the first 1,000 jobs" in jobs
    assert "<b>–</b>" in jobs, "it may hold some of the others"
    assert "0 of 0" not in jobs
    assert "of the first 1,000 jobs" in processes
    jobs, processes = pages(Depth())
    assert "<b>0</b>" in jobs
    assert "first 1,000" not in jobs + processes


class Watched(Timeline):
    """Notes on which threads it is drawn."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.threads: list[threading.Thread] = []

    def tracks(self) -> dict[str, Track]:
        self.threads.append(threading.current_thread())
        return super().tracks()


async def test_processes_are_drawn_off_the_event_loop_and_once_for_all_streams(
    monitor: Monitor, tmp_path: Path
) -> None:
    timeline = monitor.timeline = Watched(tmp_path)
    show(monitor, 1001.0, row("worker-0", 1001.0))
    live = Live(monitor)
    streams = [live.stream(["workers"]) for _ in range(3)]
    for stream in streams:
        assert (await anext(stream)).startswith(b"retry")
    sent = await asyncio.gather(*(anext(stream) for stream in streams))
    assert all(b"worker-0" in one for one in sent)
    assert len(timeline.threads) == 1
    transport = httpx.ASGITransport(make_app(monitor), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as browser:
        assert "worker-0" in (await browser.get("/workers")).text
    assert len(timeline.threads) == 2
    assert threading.current_thread() not in timeline.threads


def test_durations_are_counted_in_spans_that_double() -> None:
    assert [bucket(seconds) for seconds in (0.0, 0.1, LEAST_S, 0.2, 0.25, 1.0, 1.9, 2.0)] == [0, 0, 1, 1, 2, 4, 4, 5]
    assert bucket(1e12) == bucket(1e9)


def test_a_distribution_says_its_middle_and_its_tail() -> None:
    assert distribution({}) is None
    found = distribution({"waited": {0: 90, 4: 10}, "took": {3: 50, 10: 50}})
    assert found is not None
    assert (
        found.summary
        == "Half of them waited less than 0.125 s and took less than 1 s; 19 of 20 less than 2 s and 2 min."
    )
    assert [one.says for one in found.rows][:3] == ["under 0.125 s", "0.125 – 0.25 s", "0.25 – 0.5 s"]
    assert found.rows[-1].says == "64 s – 2 min"
    assert [one.counts for one in found.rows if any(one.counts)] == [(90, 0), (0, 50), (10, 0), (0, 50)]
    assert found.rows[0].widths == (1000.0, 0.0)


@pytest.mark.parametrize(("kind", "says"), [("took", "took"), ("waited", "waited")])
def test_a_distribution_says_nothing_of_times_that_nobody_knows(kind: str, says: str) -> None:
    only = distribution({kind: {2: 3}})
    assert only is not None
    assert only.summary == f"Half of them {says} less than 0.5 s; 19 of 20 less than 0.5 s."
