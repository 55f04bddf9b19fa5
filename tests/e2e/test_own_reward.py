"""`sluice run --reward` over real processes, and a preference loop of one's own on its groups."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceFilter
from sluice.consumers.training.step_log import read_steps
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.processes import Process, wait_gone
from tests.e2e.stack import Stack

ROOT = Path(__file__).parents[2]
HANGS = """
import threading
from sluice.examples.own_reward import score as own

def score(text, truth, row):
    if row["id"] == 0:
        threading.Event().wait()
    if row["id"] == 1:
        raise KeyError("gold")
    return own(text, truth, row) | {"first": -float(text[:1] < "m")}
"""


def run_command(stack: Stack, reward: str, *settings: str) -> Process:
    wanted = {
        "run": stack.run,
        "run_dir": stack.directory / "runs",
        "broker.embedded_dir": stack.directory / "broker",
        "sampling.max_new_tokens": 8,
        "producer.group_size": 4,
        "producer.samples_per_version": 8,
        "producer.max_in_flight": 32,
        "worker.claim_gpu": "false",
        "scorer.count": 0,
        "consumer.row_tokens": 256,
        "model.device": "cpu",
        "dashboard.enabled": "false",
    }
    sets = [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]
    sets += [word for one in settings for word in ("--set", one)]
    given = ["--model", stack.tree["model"]["path"], "--data", str(stack.data), "--reward", reward]
    return stack.sluice("run", "-c", str(ROOT / "configs/rewards.yaml"), *given, *sets)


def rows(count: int) -> list[dict[str, object]]:
    return [{**row, "id": at, "truth": ["a", "b"]} for at, row in enumerate(text_rows(count))]


def test_a_run_learns_from_ones_own_function_and_its_failures_cost_their_own_sequences(make_stack: MakeStack) -> None:
    stack = make_stack(rows(16))
    (stack.directory / "own.py").write_text(HANGS)
    run = run_command(stack, f"{stack.directory}/own.py:score", "rollout_matching.reward_timeout_s=10")
    assert run.wait(RUN_S) == 0, run.tail()
    assert "complete: enqueued 64, trained 56, dead 0, dropped 8" in run.text()
    assert f"dropped (reward_failed 4, reward_timeout 4): `sluice dlq list {stack.run_dir} --dropped`" in run.text()
    steps = read_steps(stack.run_dir / "metrics.jsonl")
    assert len(steps) == 7
    parts = {key for step in steps for key in step if key.startswith("reward/")}
    assert parts == {"reward/covers", "reward/ended", "reward/length", "reward/first"}
    assert any(step["policy/tokens"] > 0 for step in steps), "the policy loss had something to learn from"
    reader = HistoryReader(history_directory(stack.config))
    found = reader.sequences(SequenceFilter(), limit=100).rows
    reader.close()
    lost = [row.reason for row in found if row.state == "dropped"]
    assert sorted(lost) == ["reward_failed"] * 4 + ["reward_timeout"] * 4
    trained = [row for row in found if row.state == "handed_on"]
    assert all(row.reward is not None and abs(row.reward - sum(row.reward_parts.values())) < 1e-6 for row in trained)
    stack.assert_streams_empty()
    wait_gone(stack.mark)


def test_a_loss_of_ones_own_trains_the_groups_that_differ(make_stack: MakeStack) -> None:
    """Every second prompt has one reward for all its answers: those are dropped, and the others fill the batches."""
    stack = make_stack(rows(16))
    (stack.directory / "own.py").write_text(
        "def score(text, truth, row): return 1.0 if row['id'] % 2 else float(len(set(text)))"
    )
    settings = {
        "policy.loss": f"{ROOT}/examples/own_loss.py:spo",
        "policy.aggregation": "sequence",
        "policy.advantage": "rloo",
        "policy.zero_variance": "filter",
        "policy.entropy_coef": 0.001,
        "policy.mismatch": "truncate",
        "trainer.optimizer": "muon",
        "trainer.schedule": "cosine",
        "trainer.schedule_steps": 30,
    }
    run = run_command(stack, f"{stack.directory}/own.py:score", *[f"{key}={value}" for key, value in settings.items()])
    assert run.wait(RUN_S) == 0, run.tail()
    reader = HistoryReader(history_directory(stack.config))
    found = reader.sequences(SequenceFilter(), limit=100).rows
    reader.close()
    lost = [row.reason for row in found if row.state == "dropped"]
    trained = [row for row in found if row.state == "handed_on"]
    assert lost == ["zero_variance"] * len(lost)
    assert (len(lost) >= 32, len(lost) + len(trained)) == (True, 64)
    steps = read_steps(stack.run_dir / "metrics.jsonl")
    assert f"complete: enqueued 64, trained {len(trained)}, dead 0, dropped {len(lost)}" in run.text()
    assert len(steps) == -(-len(trained) // 8)
    assert all(step["policy/advantage_std"] > 0 for step in steps), "no step without a gradient"
    assert all((step["policy/entropy"] > 0) == (step["policy/tokens"] > 0) for step in steps)
    measured = [step["policy/mismatch_weight"] for step in steps if "policy/mismatch_weight" in step]
    assert measured
    assert measured == pytest.approx([1.0] * len(measured), abs=1e-3), "both compute in float32"
    stack.assert_streams_empty()
    wait_gone(stack.mark)


@pytest.mark.parametrize("loss", ["grpo", "dpo"])
def test_a_frozen_reference_is_scored_by_the_runs_own_scorer(make_stack: MakeStack, loss: str) -> None:
    """Two optimiser steps a batch; version 0 outlives the retention of 4 for as long as the run."""
    stack = make_stack(rows(16))
    (stack.directory / "own.py").write_text("def score(text, truth, row): return len(set(text))")
    settings: dict[str, object] = {
        "policy.loss": loss,
        "trainer.minibatches": 2,
        "weights.retention": 4,
        "trainer.learning_rate": 1e-3,
        "scorer.count": 1,
        "policy.score_wait_s": 600,
    }
    if loss != "dpo":
        settings["policy.kl_coef"] = 0.1
    run = run_command(stack, f"{stack.directory}/own.py:score", *[f"{key}={value}" for key, value in settings.items()])
    assert run.wait(RUN_S) == 0, run.tail()
    assert "complete: enqueued 64, trained 64, dead 0, dropped 0" in run.text()
    steps = read_steps(stack.run_dir / "metrics.jsonl")
    assert [step["train/minibatches"] for step in steps] == [2] * 8
    assert [step["policy/missing_reference_tokens"] for step in steps] == [0] * 8
    if loss == "dpo":
        assert all(step["policy/dpo_pairs"] + step["policy/dpo_skipped_groups"] == 2 for step in steps)
        assert sum(step["policy/dpo_pairs"] for step in steps) >= 8
        assert steps[0]["policy/loss"] == pytest.approx(math.log(2), abs=0.1)  # the second minibatch has moved
    else:
        assert steps[0]["policy/kl_reference"] < steps[-1]["policy/kl_reference"]
    kept = sorted(path.name for path in (stack.run_dir / "weights").glob("v*"))
    assert kept == ["v000000", "v000005", "v000006", "v000007", "v000008"]
    stack.assert_streams_empty()
    wait_gone(stack.mark)


def test_a_loop_of_ones_own_prefers_the_best_of_each_group(make_stack: MakeStack) -> None:
    stack = make_stack(rows(8))
    (stack.directory / "own.py").write_text("def score(text, truth, row): return len(set(text))")
    run = run_command(stack, f"{stack.directory}/own.py:score", "trainer.external=true")
    stack.wait(lambda now: now.accepted >= 8, "samples for the loop")
    loop = stack.spawn([sys.executable, str(ROOT / "examples/prefer_best.py"), str(stack.run_dir)], name="prefer-best")
    assert run.wait(RUN_S) == 0, run.tail()
    assert loop.wait(RUN_S) == 0, loop.tail()
    assert "version 4: " in loop.text()
    found = [step["custom/pairs"] for step in read_steps(stack.run_dir / "metrics.jsonl")]
    assert len(found) == 4
    assert all(0 < count <= 2 for count in found), "two groups a batch; one whose answers are equally good has no pair"
    wait_gone(stack.mark)
