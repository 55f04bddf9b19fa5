"""Which runs are shown and compared."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.dashboard.runs import RunLine, Runs, chosen_run, newest_version, runs_in
from sluice.consumers.history.curves import Step
from sluice.consumers.history.index import HistoryIndex
from sluice.consumers.history.reader import HistoryReader
from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.status.run_end import RunEnd, RunStart, Supervision, write_end
from tests.deadlines import HANG_S
from tests.unit.consumers.history.test_index import fill

STEP = (
    '{"step": 1, "version": 0, "at": 10.0, "train/loss": 0.5}\n'
    '{"step": 2, "version": 1, "at": 20.0, "train/loss": 0.25}\n'
)


def run(directory: Path, lines: str = STEP) -> Path:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text(lines)
    return directory


def runs(this: Path, *others: Path) -> Runs:
    monitor = Monitor(Config(run=this.name, run_dir=str(this.parent)), Redis(), HistoryReader(this / "history"))
    monitor.others = others
    return Runs(monitor)


def test_runs_beside_this_one_and_named_ones_are_listed_and_compared(tmp_path: Path) -> None:
    this, beside = run(tmp_path / "runs" / "a"), run(tmp_path / "runs" / "b")
    same, alone = run(tmp_path / "old" / "b"), run(tmp_path / "c")
    (tmp_path / "runs" / "no run").mkdir()
    known = runs(this, tmp_path / "old", alone, this)
    assert set(known.found().values()) == {this, beside, same, alone}
    assert len(known.found()) == 4
    lines = {line.name: line for line in known.lines()}
    assert (lines["a"].is_this, lines["a"].step, lines["a"].version, lines["c"].is_this) == (True, 2, 1, False)
    [loss] = [chart for chart in known.compared(["a", "c", "../../etc"]) if chart.key == "loss"]
    assert [each.name for each in loss.lines] == ["a", "c"]
    assert known.compared(["nobody"]) == []


def test_another_run_is_drawn_with_what_its_own_dashboard_has_indexed(tmp_path: Path) -> None:
    this, other = run(tmp_path / "a"), run(tmp_path / "b")
    fill(other / "history")
    known = runs(this)
    assert "endings" not in {chart.key for chart in known.compared(["a", "b"])}, "no dashboard has looked at it"
    known._curves.clear()
    own = HistoryIndex(other / "history")
    while own.catch_up(10):
        pass
    own.close()
    [endings] = [chart for chart in known.compared(["a", "b"]) if chart.key == "endings"]
    assert [line.name for line in endings.lines] == ["b"]
    known._curves.popitem()[1].close()
    (other / "history" / "index.sqlite").write_bytes(b"of another release" * 99)
    assert {chart.key for chart in known.compared(["a", "b"])} == {"loss"}


def test_the_table_keeps_no_steps_and_follows_its_files(tmp_path: Path) -> None:
    this, other = run(tmp_path / "a"), run(tmp_path / "b")
    names = [run(tmp_path / f"c{at:02}").name for at in range(20)]
    known = runs(this)
    first = {line.name: line for line in known.lines()}
    assert not known._curves, "every step of every run would be held"
    assert {line.name: line for line in known.lines()} == first
    with (other / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "version": 2, "at": 30.0, "train/loss": 0.1}\n')
    assert {line.name: line.step for line in known.lines()} == {**{name: 2 for name in first}, "b": 3}
    for name in names:
        assert known.compared([name])
    assert len(known._curves) == 16


def test_pages_that_ask_at_once_each_list_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this, read = run(tmp_path / "a"), Runs._line
    run(tmp_path / "b")
    known = runs(this)
    began, go = threading.Event(), threading.Event()
    seconds: list[Future[list[RunLine]]] = []

    def line(self: Runs, name: str, *given: Any) -> RunLine:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert go.wait(HANG_S)
        elif name == "b":  # the second one begins while the first is halfway, and finds a step more
            os.utime(this / "metrics.jsonl", (1, 1))
            seconds.append(pool.submit(known.lines))
            assert began.wait(HANG_S)
        return read(self, name, *given)

    monkeypatch.setattr(Runs, "_line", line)
    with ThreadPoolExecutor(1) as pool:
        first = known.lines()
        go.set()
    [second] = seconds
    assert [[line.name for line in each] for each in (first, second.result(), known.lines())] == [["a", "b"]] * 3


def test_a_directory_of_runs_shows_its_newest_wherever_it_was_moved(tmp_path: Path) -> None:
    run(tmp_path / "old")
    new = run(tmp_path / "new")
    (new / "broker").mkdir()
    (new / "config.resolved.yaml").write_text("run: first\nrun_dir: /elsewhere\ndashboard: {port: 40599}\n")
    os.utime(tmp_path / "old" / "metrics.jsonl", (1, 1))
    config, directory = chosen_run(Config(), [tmp_path])
    assert directory == new.resolve()
    assert (config.run, config.run_dir) == ("first", str(tmp_path.resolve()))
    assert config.dashboard.port == Config().dashboard.port, "not the one that was free then"
    assert config.broker.embedded_dir == str(new.resolve() / "broker")
    assert chosen_run(Config(), [tmp_path / "old"])[0].run == "old"
    (tmp_path / "old" / "config.resolved.yaml").write_text("run: first")
    config, directory = chosen_run(Config(), [tmp_path / "old"])
    assert (config.run, directory.name) == ("first", "old"), "its broker has it under the name that it was started with"
    secret = BrokerConfig(url="redis://:secret@elsewhere:6379/0")
    assert chosen_run(Config(broker=secret), [tmp_path / "new"])[0].broker.url == secret.url, "no run stores a password"
    with pytest.raises(ConfigError, match="nowhere is no run and no directory; runs are below run_dir"):
        chosen_run(Config(), [tmp_path / "new", tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty is no run and holds none: a run's directory has"):
        chosen_run(Config(), [tmp_path / "empty"])
    with pytest.raises(ConfigError, match=f"did you mean {tmp_path / 'new'}"):
        chosen_run(Config(run_dir=str(tmp_path)), [Path("new")])


def test_the_table_says_how_a_run_ended_until_it_trains_again(tmp_path: Path) -> None:
    this = run(tmp_path / "a")
    known = runs(this)
    assert known.lines()[0].end is None
    last = known.lines()[0].at or 0.0
    write_end(this, RunEnd(at=last + 1, state="failed", cause="trainer stopped: no"))
    [line] = known.lines()
    assert line.end is not None
    assert (line.end.state, line.end.cause) == ("failed", "trainer stopped: no")
    write_end(this, RunEnd(at=last - 1, state="failed"))
    assert known.lines()[0].end is None


def test_this_run_was_not_killed_if_the_broker_knows_a_live_role(tmp_path: Path) -> None:
    """Its files alone can't tell: the roles that were started by hand since write the same ones."""
    this = run(tmp_path / "a")
    with Supervision(this, RunStart(at=1.0)):
        pass
    known = runs(this)
    [line] = known.lines()
    assert line.end is not None
    assert line.end.state == "killed"
    known._monitor.seen_at = 1.0
    assert known.lines()[0].end is None
    known._monitor.problem = "the broker does not answer"
    assert known.lines()[0].end == line.end


def test_a_name_that_is_no_unicode_breaks_no_page(tmp_path: Path) -> None:
    this = run(tmp_path / "a")
    odd = run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff")))
    known = runs(this)
    assert known.found() == {"a": this, "b\ufffd": odd}
    [loss] = known.compared(["b\ufffd"])
    assert loss.lines[0].values == [0.5, 0.25]


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    this = run(tmp_path / "a")
    (tmp_path / "b").symlink_to("x" * 300)  # any error but "not found"
    (tmp_path / "c" / "metrics.jsonl").mkdir(parents=True)
    assert set(runs(this).found()) == {"a"}
    assert [line.step for line in runs(this).lines()] == [2]
    assert [one.name for one in runs_in(tmp_path)] == ["a"]


def test_the_version_of_a_run_is_the_newest_that_is_published(tmp_path: Path) -> None:
    assert newest_version(tmp_path, None) is None
    assert newest_version(tmp_path, Step(step=2, version=1, at=1.0, values={})) == 1
    (tmp_path / "weights" / "v000002").mkdir(parents=True)
    assert newest_version(tmp_path, Step(step=2, version=1, at=1.0, values={})) == 2
