"""The demo's audit finds what is lost or doubled; its report needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from sluice.consumers.history.curves import Chart, line
from sluice.consumers.training.step_log import StepLog
from sluice.demo import answers, report
from sluice.demo.audit import audit
from sluice.demo.charts import Mark, bar_chart, still, tick
from sluice.demo.cli import demo
from sluice.demo.drill import Drill
from sluice.demo.heldout import Heldout
from sluice.demo.mid_sequence import MidSequence
from sluice.demo.report import Report
from sluice.demo.run import cost_keys, keep_ends, kill_cost_of, tell
from sluice.demo.tasks import load_task
from sluice.demo.tools.demonstrations import worked
from sluice.demo.tools.evaluate import Conversation
from sluice.demo.tools.problems import Problem
from sluice.pipeline.config.types import Config, DataConfig, RolloutConfig, UpConfig
from sluice.pipeline.errors import ConfigError
from sluice.pipeline.queue import job_id_for, rollout_group_for
from sluice.pipeline.run.progress_panel import Progress
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.status.snapshot import Snapshot
from tests.demo_runs import inlined, report_of, without_scripts, written


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


def test_rollouts_are_known_by_the_ids_that_their_producer_gives_them(tmp_path: Path) -> None:
    config, _ = run_of(tmp_path)
    config = msgspec.structs.replace(config, rollout=RolloutConfig(url="http://127.0.0.1:1"))
    ids = [f"{rollout_group_for('r', str(number), 0, config.sampling, 1)}:0" for number in range(4)]
    ledger(tmp_path, ids[:3], [ids[3], f"{ids[3]}/1"])
    found = audit(config, tmp_path)
    assert (found.lost, found.duplicated) == (0, 0)


@pytest.mark.parametrize(("part", "doubled"), [("/2", 0), ("/1", 1), ("stranger:0/1", 1)])
def test_the_trajectories_of_one_rollout_are_one_of_the_data(tmp_path: Path, part: str, doubled: int) -> None:
    config, ids = run_of(tmp_path)
    other = part if part.startswith("stranger") else ids[0] + part
    ledger(tmp_path, [*ids[:3], f"{ids[0]}/1"], [ids[3], other])
    found = audit(config, tmp_path)
    assert (found.lost, found.duplicated) == (0, doubled)


def chart(*points: tuple[float, float], name: str = "<n>", unit: str = "score") -> Chart:
    made = [line(name, [(x, x, y) for x, y in points])] if points else []
    return Chart(key="k", title="a < b & c", unit=unit, about="", lines=made)


def test_a_still_picture_is_one_svg_whatever_its_points() -> None:
    for points in ([], [(0.0, 0.0)], [(0.0, 1.0), (5.0, -1.0)], [(1.0, 1e9)], [(3.0, -2.0)]):
        root = ElementTree.fromstring(still(chart(*points), [Mark("<kill>", 2.0, 2.0), Mark("far", 1e6, 1.0)]))
        assert root.tag.endswith("svg")
        assert "<kill>" in [text.text for text in root.iter("text")]
        assert not [one for one in root.iter() if "style" in one.attrib]  # the page's policy refuses them


def test_a_still_picture_goes_from_left_to_right_and_up() -> None:
    root = ElementTree.fromstring(still(chart((0.0, 0.0), (10.0, 0.5), (20.0, 1.0), unit="share")))
    (drawn,) = root.iter("polyline")
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in drawn.attrib["points"].split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x1 > x0
    assert y1 < y0


def test_a_bar_is_as_high_as_its_value() -> None:
    for bars in ([], [("<1>", 0.0)]):
        assert ElementTree.fromstring(bar_chart("x", bars)).tag.endswith("svg")
    root = ElementTree.fromstring(bar_chart("x", [("1", 40.0), ("2", 10.0)]))
    first, second = (float(bar.attrib["height"]) for bar in root.iter("rect"))
    assert first == pytest.approx(4 * second, abs=0.2)


@pytest.mark.parametrize(("span", "step"), [(1.0, 0.5), (4.0, 1.0), (7.9, 2.0), (300.0, 100.0), (0.03, 0.01)])
def test_ticks_are_round(span: float, step: float) -> None:
    assert tick(span) == pytest.approx(step)


def test_the_report_needs_nothing_but_itself(tmp_path: Path) -> None:
    text = written(tmp_path, report_of(tmp_path, load_task("pictures"), killed=True))
    page = without_scripts(text)
    assert set(re.findall(r"""\b(?:src|href|action)\s*=\s*["']?([a-z]*:?)""", page)) == {"data:"}
    assert not re.search(r"@import|url\(", text)
    assert not re.search(r"<[^>]*\sstyle=", page)  # the policy refuses them
    assert "data:image/png;base64," in page


def test_the_policy_names_exactly_the_scripts_and_styles_of_the_page(tmp_path: Path) -> None:
    text = written(tmp_path, report_of(tmp_path, load_task("digits")))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    parts = dict(part.split(" ", 1) for part in html.unescape(policy).split("; "))
    for name, element in (("script-src", "script"), ("style-src", "style")):
        found = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        assert found
        digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found]
        assert parts[name].split() == [f"'sha256-{digest}'" for digest in digests]
    assert parts["default-src"] == "'none'"


def test_the_report_tells_the_scores_apart_and_what_was_seen_before(tmp_path: Path) -> None:
    task = load_task("pictures")
    text = written(tmp_path, report_of(tmp_path, task))
    assert "<h1>Held-out F1 0.10 → 0.90</h1>" in text
    for words in (task.metric_meaning, task.rollouts.title, task.rollouts.meaning, task.seen):
        assert html.escape(words, quote=False) in text
    keys = [one["key"] for one in inlined(text)["charts"]]
    assert keys[:5] == ["heldout", "rollouts", "sequences", "decoding", "loss"]
    assert text.count('<figure class="chart"') == len(keys)
    assert "ended as loops" not in text  # the guard was off


def test_the_kill_is_a_mark_on_the_curves_and_a_sentence(tmp_path: Path) -> None:
    text = written(tmp_path, report_of(tmp_path, load_task("digits"), killed=True))
    (mark,) = inlined(text)["marks"]
    assert (mark["name"], mark["step"], mark["at"]) == ("worker-1 killed", 3.0, 1003.5)
    assert "<b>worker-1</b> got a SIGKILL 0:04 into the run and held 2 jobs." in text
    assert "began 0.6 s after the kill, on worker-0." in text
    assert "They decoded 16 tokens, about 3 of them for the second time" in text
    assert text.count('<rect class="died"') == text.count('<rect class="again"') == 2


def test_a_run_without_a_kill_says_so(tmp_path: Path) -> None:
    text = written(tmp_path, report_of(tmp_path, load_task("digits")))
    assert inlined(text)["marks"] == []
    assert "No worker was killed in this run" in text
    assert "SIGKILL" not in text


def test_what_cannot_be_known_of_a_kill_is_said(tmp_path: Path) -> None:
    told = report_of(tmp_path, load_task("tools"), killed=True)
    text = written(tmp_path, replace(told, cost=kill_cost_of(told.task, tmp_path, told.drill)))
    assert "while 2 sequences were running in it" in text
    assert "calls of agent rollouts" in text


def test_an_unknown_cost_of_a_kill_has_no_keys(tmp_path: Path) -> None:
    for name, known in (("tools", False), ("digits", True)):
        told = report_of(tmp_path, load_task(name), killed=True)
        found = cost_keys(kill_cost_of(told.task, tmp_path, told.drill))
        assert ("kill_jobs" in found) is known
        assert bool(found) is known
    told = report_of(tmp_path, load_task("digits"))
    assert cost_keys(kill_cost_of(told.task, tmp_path, told.drill)) == {}


def test_a_history_that_cannot_be_read_costs_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = report_of(tmp_path, load_task("digits"), killed=True)
    (tmp_path / "history").mkdir()
    (tmp_path / "history/consumer-0.sqlite").write_text("no database" * 100)
    assert kill_cost_of(told.task, tmp_path, told.drill) is None
    assert "without the cost of the kill: " in capsys.readouterr().err
    (tmp_path / "history/consumer-0.sqlite").unlink()
    assert "so what the kill cost is not known" in written(tmp_path, replace(told, cost=None))


def test_the_result_is_told_before_a_report_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, heldout = finished(tmp_path)
    (tmp_path / "report.html").mkdir()
    tell(tmp_path, told, heldout, usual=True)
    said = capsys.readouterr().err
    assert "0.10 → 0.90 over 8 weight versions" in said
    assert "0 lost, 0 trained twice" in said
    assert said.index("trained twice") < said.index("without the report: ")
    assert "report.html" in said.splitlines()[-1]


def test_the_result_ends_with_the_reports_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, heldout = finished(tmp_path)
    tell(tmp_path, told, heldout, usual=True)
    assert capsys.readouterr().err.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"


def test_the_runs_own_score_of_the_same_name_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, heldout = finished(tmp_path)
    metric = told.task.metric
    told = replace(told, summary=told.summary | {f"{metric}_evaluated": 0.987, "rollouts_last": 0.4})
    tell(tmp_path, told, heldout, usual=True)
    [line] = [one for one in capsys.readouterr().err.splitlines() if "0.99" in one]
    assert line == "  nor the 0.99 of `sluice status`: held-out problems, measured as the rollouts are"


def finished(run_dir: Path) -> tuple[Report, Heldout]:
    told = report_of(run_dir, load_task("arithmetic"))
    problems = told.task.heldout(told.task.num_heldout, 0)
    return told, Heldout(problems, [""] * len(problems), [one.worked for one in problems])


async def test_scores_of_others_in_the_same_file_are_left_alone(tmp_path: Path) -> None:
    told, heldout = finished(tmp_path)
    drill, metric = told.drill, told.task.metric
    with (tmp_path / "evals.jsonl").open("w") as stream:
        stream.write(json.dumps({"version": 4, "at": 1.0, metric: 0.5}) + "\n")
        for other in ({"version": 8, "at": 2.0, "bleu": 0.3}, {"version": 8, "at": 2.0, metric: None}, {metric: 1}, 7):
            stream.write(json.dumps(other) + "\n")
        stream.write("{not JSON}\n")
    supervisor, progress = Supervisor(UpConfig(), tmp_path, {}), Progress("demo")
    await drill.watch(Snapshot(run="r", state="running"), supervisor, progress)
    assert progress.extra == {told.task.metric_title: "0.50 (v4)"}
    keep_ends(drill, heldout, 8)
    assert [(one.version, one.values[metric]) for one in drill.scores()] == [(4, 0.5), (0, 0.0), (8, 1.0)]


def test_lost_sequences_are_the_headline(tmp_path: Path) -> None:
    text = written(tmp_path, report_of(tmp_path, load_task("digits"), lost=3))
    assert "but sequences were lost or trained twice</h1>" in text
    assert 'class="verdict-band bad"' in text


def test_a_stopped_run_has_a_report_of_what_it_had_done(tmp_path: Path) -> None:
    told = report_of(tmp_path, load_task("digits"), killed=True)
    counts = {"enqueued": 8, "trained": 4, "total": 3840, "worker_kills": 1, "versions": 4, "pipeline_s": 9.0}
    text = written(tmp_path, replace(told, summary=counts, stopped=True))
    assert "<h1>Stopped early: 4 of 3,840 sequences trained</h1>" in text
    assert "of those that have ended since" in text
    assert ">lost<" not in text
    assert "The curve <i>Held out</i> is of 100 problems" in text


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    told = report_of(tmp_path, load_task("digits"))
    counts = {"enqueued": 8, "trained": 4, "total": 3840, "worker_kills": 0, "versions": 4, "pipeline_s": 9.0}
    failure = "trainer stopped: <no> model"
    text = written(tmp_path, replace(told, summary=counts, stopped=True, failure=failure))
    assert "<h1>Failed: trainer stopped: &lt;no&gt; model</h1>" in text
    assert "after 4 of 3,840 sequences were trained" in text
    assert 'class="verdict-band bad"' in text


def test_a_run_that_was_stopped_at_once_has_empty_parts_and_no_error(tmp_path: Path) -> None:
    task = load_task("digits")
    config = Config(run=tmp_path.name, run_dir=str(tmp_path.parent))
    drill = Drill(task, config, tmp_path / "evals.jsonl", kill=True)
    counts = {"enqueued": 0, "trained": 0, "total": 3840, "worker_kills": 0, "versions": 0, "pipeline_s": 1.0}
    text = written(tmp_path, Report(task, counts, drill, task.heldout(2, 0), stopped=True))
    assert "No step was trained, so there is nothing to draw." in text
    assert "it ended before a quarter of its sequences was decoded" in text
    assert "No version had been scored yet when the run ended." in text


def test_problems_go_through_time_with_answers_escaped(tmp_path: Path) -> None:
    task = load_task("arithmetic")
    problem = task.heldout(1, 0)[0]
    views = {0: "</script><b>=1", 2: "1+1=3", 8: problem.worked}
    told = replace(report_of(tmp_path, task), problems=[problem], landed=MidSequence(frozenset({3}), {1: 40, 3: 24}))
    (tmp_path / answers.FILE).unlink()
    for version, text in views.items():
        view = task.answer_view(problem, text)
        answers.keep(tmp_path / answers.FILE, answers.Answers(version, 1000.0 + version, [view]))
    text = written(tmp_path, told)
    assert "One held-out problem through time" in text
    columns = [("warm start", "v0, 0:00"), ("a quarter", "v2, 0:02"), ("last", "v8, 0:08")]
    assert re.findall(r'<figcaption><b>([^<]*)</b> <span class="muted">(v[0-9]+, [0-9:]+)', text) == columns
    pills = [("bad", "wrong"), ("bad", "wrong"), ("good", "right")]
    assert re.findall(r'class="pill (good|bad)">(\w+)<', text) == pills
    assert "<span>&lt;/script&gt;&lt;b&gt;=1</span>" in text
    assert f"<span>{problem.worked.split(';')[-1]}</span>" in text
    assert "Trained sequences by the number of weight versions that sampled them: 1: 40, 3: 24" in text


def test_calls_of_tools_are_shown_and_turns_have_a_chart_of_their_own(tmp_path: Path) -> None:
    task = load_task("tools")
    problem = Problem((37, 46, 12), "*+", 0)
    right = Conversation(worked(problem), num_turns=3, ended=True)
    wrong = Conversation([*worked(problem)[:1], {"role": "assistant", "content": "<b>"}], num_turns=1, ended=True)
    heldout = Heldout([problem], [wrong], [right])
    scores = {"accuracy_warm": 0.0, "accuracy_final": 1.0, "turns_warm": 1.0, "turns_final": 3.0}
    assert heldout.scores(task) == scores
    told = replace(report_of(tmp_path, task, turns=2.5), problems=[problem])
    (tmp_path / answers.FILE).unlink()
    for version, one in ((0, wrong), (8, right)):
        view = task.answer_view(problem, one)
        answers.keep(tmp_path / answers.FILE, answers.Answers(version, 1000.0 + version, [view]))
    text = written(tmp_path, told)
    charts = {one["key"]: one for one in inlined(text)["charts"]}
    assert [one["name"] for one in charts["heldout"]["lines"]] == ["accuracy"]
    assert [one["name"] for one in charts["also"]["lines"]] == ["turns"]
    assert charts["turns"]["lines"][0]["values"] == [2.5] * 8
    assert "<span>&lt;b&gt;</span>" in text
    assert "<span>add {&#34;a&#34;: 1702, &#34;b&#34;: 12} → 1714</span>" in text


def test_what_the_guard_did_is_shown_where_it_was_on() -> None:
    prefix = "rollout/repeat_terminate_"
    steps = [
        {f"{prefix}active": 1.0, f"total/{prefix}triggered_sequences": 1.0, f"total/{prefix}tokens_saved": 40.0},
        {f"{prefix}active": 0.0, f"total/{prefix}triggered_sequences": 3.0, f"total/{prefix}tokens_saved": 90.0},
    ]
    assert report.guard_sums(steps) == [("ended as loops", "3"), ("tokens saved", "90")]
    assert report.guard_sums([{f"{prefix}active": 0.0}]) == []


def test_fewer_prompts_than_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts: must be at least 1, got 0"):
        demo(prompts=0, dir=tmp_path)
    assert not list(tmp_path.iterdir())
