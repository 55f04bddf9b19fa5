"""The demo's audit finds what is lost or doubled; its report needs nothing but itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from sluice.consumers.training.step_log import StepLog
from sluice.demo import report
from sluice.demo.audit import audit
from sluice.demo.charts import Line, bar_chart, line_chart
from sluice.demo.cli import demo
from sluice.demo.digits.model import ModelSettings
from sluice.demo.digits.warm_start import WarmStartSettings, ensure_warm_start
from sluice.demo.drill import Drill, Moment
from sluice.demo.heldout import Heldout
from sluice.demo.mid_sequence import MidSequence
from sluice.demo.tasks import DemoTask, load_task
from sluice.demo.tools.demonstrations import worked
from sluice.demo.tools.evaluate import Conversation
from sluice.demo.tools.problems import Problem
from sluice.pipeline.config.types import Config, DataConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.queue import job_id_for
from sluice.pipeline.status.snapshot import Snapshot


def run_of(tmp_path: Path, rows: int = 4, **counts: int) -> tuple[Config, list[str]]:
    """A finished run's files; returns the ids that its data imply."""
    data = tmp_path / "train.jsonl"
    line = {"messages": [{"role": "user", "content": "x"}]}
    data.write_text("".join(json.dumps({**line, "id": number}) + "\n" for number in range(rows)))
    config = Config(run="r", data=DataConfig(path=str(data)))
    now = Snapshot(run="r", state="finished", enqueued=rows, latest_version=2, **counts)  # pyright: ignore[reportArgumentType]
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode(now))
    ids = [f"{job_id_for('r', str(number), 0, config.sampling, 1)}:0" for number in range(rows)]
    return config, ids


def ledger(tmp_path: Path, *steps: list[str]) -> None:
    log = StepLog(tmp_path / "trained.jsonl")
    for number, ids in enumerate(steps, start=1):
        log.append(number, seq_ids=ids)


def test_a_whole_run_has_nothing_lost_and_nothing_doubled(tmp_path: Path) -> None:
    config, ids = run_of(tmp_path)
    ledger(tmp_path, ids[:2], ids[2:])
    found = audit(config, tmp_path)
    assert (found.trained, found.lost, found.duplicated, found.versions) == (4, 0, 0, 2)


@pytest.mark.parametrize(
    ("taken", "lost", "doubled"),
    [([0, 1, 2], 1, 0), ([0, 1, 2, 3, 3], 0, 1), ([0, 0, 0, 1], 2, 2), ([], 4, 0)],
)
def test_lost_and_doubled_ids_are_found(tmp_path: Path, taken: list[int], lost: int, doubled: int) -> None:
    config, ids = run_of(tmp_path)
    ledger(tmp_path, [ids[number] for number in taken])
    found = audit(config, tmp_path)
    assert (found.lost, found.duplicated) == (lost, doubled)


def test_dead_and_dropped_sequences_are_not_lost_and_strangers_count_as_doubled(tmp_path: Path) -> None:
    config, ids = run_of(tmp_path, dead=1, dropped=1)
    ledger(tmp_path, [*ids[:2], "stranger:0"])
    found = audit(config, tmp_path)
    assert (found.lost, found.duplicated) == (0, 1)


@pytest.mark.parametrize(("part", "doubled"), [("/2", 0), ("/1", 1), ("stranger:0/1", 1)])
def test_the_trajectories_of_one_rollout_are_one_of_the_data(tmp_path: Path, part: str, doubled: int) -> None:
    config, ids = run_of(tmp_path)
    other = part if part.startswith("stranger") else ids[0] + part
    ledger(tmp_path, [*ids[:3], f"{ids[0]}/1"], [ids[3], other])
    found = audit(config, tmp_path)
    assert (found.lost, found.duplicated) == (0, doubled)


def test_a_chart_is_one_svg_whatever_its_points() -> None:
    for points in ([], [(0.0, 0.0)], [(0.0, 1.0), (5.0, -1.0)], [(1.0, 1e9)]):
        root = ElementTree.fromstring(line_chart("a < b & c", "x", [Line("<n>", points)], mark=0.5))
        assert root.tag.endswith("svg")


def test_a_bar_is_as_high_as_its_value() -> None:
    for bars in ([], [("<1>", 0.0)]):
        assert ElementTree.fromstring(bar_chart("a < b", "x", "y", bars)).tag.endswith("svg")
    root = ElementTree.fromstring(bar_chart("t", "x", "y", [("1", 40.0), ("2", 10.0)]))
    first, second = (float(bar.attrib["height"]) for bar in root if bar.tag == "rect")
    assert first == pytest.approx(4 * second, abs=0.2)


def write_page(
    run_dir: Path, task: DemoTask, heldout: Heldout, counts: Mapping[str, int], landed: MidSequence | None = None
) -> str:
    """A report over a made-up timeline; `<metric>` goes from 0.1 to 0.9."""
    config, _ = run_of(run_dir)
    drill = Drill(task, config, run_dir / "evals.jsonl", kill=True)
    drill.timeline = [Moment(float(at), at * 100, at, at, at) for at in range(9)]
    drill.kill_at_s = 3.0
    (run_dir / "evals.jsonl").write_text(f'{{"version": 1, "{task.metric}": 0.5}}\n{{"version": 2, "{task.metric}"')
    names = ("trained", "lost", "duplicated", "dead", "dropped", "worker_kills", "versions", "enqueued")
    summary: dict[str, Any] = {name: 1 for name in names} | dict(counts) | {"pipeline_s": 3.0, "wall_s": 4.0}
    summary |= {f"{task.metric}_warm": 0.1, f"{task.metric}_final": 0.9}
    page = report.write(run_dir, task, summary=summary, drill=drill, heldout=heldout, landed=landed)
    text = page.read_text()
    assert "0.90" in text
    assert "SIGKILL" in text
    assert task.metric_meaning in text
    assert task.rollouts.meaning in text
    assert "ended as loops" not in text  # the guard was off
    assert not re.search(r"(src|href|@import|url\()\s*=?\s*[\"']?(https?:)?//", text)
    assert "<script" not in text
    return text


def test_the_report_is_one_file_without_any_address(tmp_path: Path) -> None:
    tiny = ModelSettings(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    model = ensure_warm_start(tmp_path / "cache", replace(WarmStartSettings(), num_steps=1, batch_size=1, model=tiny))
    task = load_task("digits")
    text = write_page(tmp_path, task, Heldout.of(task, model, model, count=1), {})
    assert "F1 over weight versions" in text
    assert text.count("<svg") == 5
    assert "mid-sequence" not in text


def test_the_report_shows_answers_and_what_landed_in_mid_sequence(tmp_path: Path) -> None:
    task = load_task("arithmetic")
    problem = task.heldout(1, 0)[0]
    heldout = Heldout([problem], ["<b>=1"], [problem.worked])
    landed = MidSequence(frozenset({3, 4}), {1: 40, 3: 24})
    text = write_page(tmp_path, task, heldout, {"mid_sequence_updates": 2}, landed)
    assert "Accuracy over weight versions" in text
    assert "Weight versions within one trained sequence" in text
    assert text.count("<svg") == 4
    assert "&lt;b&gt;=1" in text
    assert text.index('class="no"><b>wrong') < text.index('class="yes"><b>right')
    assert f"<span>{problem.worked.split(';')[-1]}</span>" in text


def test_the_report_of_rollouts_with_tools_shows_every_call(tmp_path: Path) -> None:
    task = load_task("tools")
    problem = Problem((37, 46, 12), "*+", 0)
    right = Conversation(worked(problem), num_turns=3, ended=True)
    wrong = Conversation([*worked(problem)[:1], {"role": "assistant", "content": "<b>"}], num_turns=1, ended=True)
    heldout = Heldout([problem], [wrong], [right])
    scores = {"accuracy_warm": 0.0, "accuracy_final": 1.0, "turns_warm": 1.0, "turns_final": 3.0}
    assert heldout.scores(task) == scores
    text = write_page(tmp_path, task, heldout, {"mid_sequence_updates": 2}, MidSequence(frozenset({3}), {1: 4}))
    assert "Turns of a rollout over weight versions" in text
    assert text.count("<svg") == 5
    assert "&lt;b&gt;" in text
    assert text.index('class="no"><b>wrong') < text.index('class="yes"><b>right')
    assert "<span>add {&#34;a&#34;: 1702, &#34;b&#34;: 12} → 1714</span>" in text


def test_what_the_guard_did_is_shown_where_it_was_on() -> None:
    prefix = "rollout/repeat_terminate_"
    steps = [
        {f"{prefix}active": 1.0, f"total/{prefix}triggered_sequences": 1.0, f"total/{prefix}tokens_saved": 40.0},
        {f"{prefix}active": 0.0, f"total/{prefix}triggered_sequences": 3.0, f"total/{prefix}tokens_saved": 90.0},
    ]
    assert report.guard_cards(steps) == [("ended as loops", 3), ("tokens saved", 90)]
    assert report.guard_cards([{f"{prefix}active": 0.0}]) == []


def test_fewer_prompts_than_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts: must be at least 1, got 0"):
        demo(prompts=0, dir=tmp_path)
    assert not list(tmp_path.iterdir())
