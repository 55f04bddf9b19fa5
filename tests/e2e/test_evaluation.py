"""`sluice run` with held-out prompts: evaluated to the last version, the best one kept, stopped when none is better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.consumers.evaluation.results import FOLDER, evaluations, read_answers
from sluice.consumers.training.step_log import read_steps
from sluice.pipeline.status.evaluation import best_of
from sluice.pipeline.status.run_end import read_end
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.processes import Process, wait_gone
from tests.e2e.stack import ENDLESS, Stack

ROOT = Path(__file__).parents[2]
_HELD_OUT = 4


def run_command(stack: Stack, reward: str, *settings: str) -> Process:
    held_out = stack.directory / "held-out.jsonl"
    rows = [{**row, "id": f"h{at}"} for at, row in enumerate(text_rows(_HELD_OUT))]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = {
        "run": stack.run,
        "run_dir": stack.directory / "runs",
        "broker.embedded_dir": stack.directory / "broker",
        "sampling.max_new_tokens": 8,
        "producer.group_size": 4,
        "producer.samples_per_version": 8,
        "producer.max_in_flight": 16,
        "producer.max_staleness": 0,
        "weights.retention": 3,
        "worker.claim_gpu": "false",
        "scorer.count": 0,
        "consumer.row_tokens": 256,
        "model.device": "cpu",
        "dashboard.enabled": "false",
        "eval.data": held_out,
        "eval.every": 1,
        "eval.n": 2,
        "eval.k": "[1, 2]",
        "eval.temperature": 1.0,
        "eval.keep_answers": "null",
    }
    sets = [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]
    sets += [word for one in settings for word in ("--set", one)]
    given = ["--model", stack.tree["model"]["path"], "--data", str(stack.data), "--reward", reward]
    return stack.sluice("run", "-c", str(ROOT / "configs/rewards.yaml"), *given, *sets)


def reward_that_waits(stack: Stack) -> str:
    """The example's. Nothing is trained before the first version is evaluated, which is retired three steps later."""
    evaluated = str(stack.run_dir / "evals.jsonl")
    (stack.directory / "waits.py").write_text(f"""
import time
from pathlib import Path
from sluice.examples.own_reward import score as own

def score(text, truth, row):
    while not str(row["id"]).startswith("h") and not Path({evaluated!r}).exists():
        time.sleep(0.01)
    return own(text, truth, row)
""")
    return f"{stack.directory}/waits.py:score"


def results(stack: Stack) -> list[dict[str, float]]:
    return [json.loads(line) for line in (stack.run_dir / "evals.jsonl").read_text().splitlines()]


def rows(count: int) -> list[dict[str, object]]:
    return [{**row, "id": at, "truth": ["a", "b"]} for at, row in enumerate(text_rows(count))]


def test_a_run_ends_with_the_evaluation_of_its_last_version_and_keeps_the_best(make_stack: MakeStack) -> None:
    stack = make_stack(rows(16))
    reward = reward_that_waits(stack)
    patient = f"rollout_matching.reward_timeout_s={RUN_S}"
    # Before the run there is nothing to wait for: its checks try the reward on no row.
    first = run_command(stack, reward, "eval.metric=reward_mean", patient, "preflight.max_s=0")
    assert first.wait(RUN_S) == 0, first.tail()
    assert "complete: enqueued 64, trained 64, dead 0, dropped 0" in first.text()
    steps = read_steps(stack.run_dir / "metrics.jsonl")
    versions = [int(row["version"]) for row in results(stack)]
    assert (versions[0], versions[-1], len(steps)) == (0, 8, 8)
    assert versions == sorted(set(versions))
    for row in results(stack):
        given = read_answers(dict(evaluations(stack.run_dir / FOLDER))[int(row["version"])])
        assert len(given) == 2 * _HELD_OUT
        assert not any(one.failed for one in given)
        assert row["eval/reward_mean"] == pytest.approx(sum(one.reward or 0 for one in given) / len(given))
    best = max(results(stack), key=lambda row: row["eval/reward_mean"])["version"]
    assert best_of(stack.run_dir) == best
    kept = {int(path.name[1:]) for path in (stack.run_dir / "weights").iterdir()}
    assert {6, 7, 8, int(best)} <= kept, "three by weights.retention, and the best one"
    # When the last one came, another may have been the best one so far, and one more under evaluation.
    assert len(kept) <= 5
    assert ":eval-" not in (stack.run_dir / "trained.jsonl").read_text()
    assert json.loads((stack.run_dir / "summary.json").read_text())["evaluated"] == 2 * _HELD_OUT * len(versions)
    before = (stack.run_dir / "evals.jsonl").read_bytes()
    second = run_command(stack, reward, "eval.metric=reward_mean", patient)
    assert second.wait(RUN_S) == 0, second.tail()
    assert (stack.run_dir / "evals.jsonl").read_bytes() == before
    wait_gone(stack.mark)


def test_a_run_whose_evaluations_get_no_better_stops_and_goes_on_with_more_patience(make_stack: MakeStack) -> None:
    stack = make_stack(rows(40))
    (stack.directory / "same.py").write_text("def score(text, truth, row):\n    return 1.0\n")
    reward = f"{stack.directory}/same.py:score"
    kept = "weights.retention=100"  # the first version is evaluated, however late the evaluator starts
    first = run_command(stack, reward, "eval.patience=2", kept, f"data.epochs={ENDLESS['epochs']}")
    assert first.wait(RUN_S) == 0, first.tail()
    assert "stopped: eval/pass@1 has not risen above 1 (v0) in 2 evaluations (eval.patience 2)" in first.text()
    end = read_end(stack.run_dir)
    assert end is not None
    assert (end.state, end.exit_code, "eval.patience" in end.cause) == ("stopped", 0, True)
    assert len(results(stack)) == 3
    stack.end_data()
    epochs = stack.config.data.epochs
    second = run_command(stack, reward, "eval.patience=100", kept, f"data.epochs={epochs}")
    assert second.wait(RUN_S) == 0, second.tail()
    assert f"complete: enqueued {160 * epochs}, trained {160 * epochs}, dead 0, dropped 0" in second.text()
    assert len(results(stack)) > 3
    wait_gone(stack.mark)
