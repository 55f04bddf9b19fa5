"""Runs over processes with a vision-language model and PNG files."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from sluice.consumers.training.step_log import read_rollouts, read_steps
from tests.chaos.blows import is_stopped, resume
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import Process
from tests.e2e.stack import Row, Stack
from tests.seen_samples import image_files
from tests.tiny_vision_models import save_tiny_qwen3_vl

ROOT = Path(__file__).parents[2]
ROWS, SEEN = 10, 8
REPORT = 178  # of progress: each sequence makes 4 at most, so 40 have ended by then, and of 88 some always run


def rows_of(root: Path, count: int = ROWS, seen: int = SEEN) -> list[Row]:
    """Rows with one or two pictures each, and at the end some of text alone."""
    rows: list[Row] = []
    for at in range(count):
        text = [{"type": "text", "text": f"what is on {at}?"}]
        images: list[str] = []
        if at < seen:
            images = [f"{at}/{ref.path}" for ref in image_files(root / str(at), 1 + at % 2, seed=10 * at)]
        content: Any = [*({"type": "image"} for _ in images), *text] if images else f"say {at}"
        rows.append(
            {"id": at, "messages": [{"role": "user", "content": content}], "truth": f"a {at}", "images": images}
        )
    return rows


@pytest.mark.parametrize("policy", [False, True], ids=["teacher forcing", "policy loss"])
def test_pictures_are_trained_on_and_one_that_disappears_costs_its_own_sequences_alone(
    make_stack: MakeStack, tmp_path: Path, policy: bool
) -> None:
    root, model = tmp_path / "scans", save_tiny_qwen3_vl(tmp_path / "qwen3-vl")
    stack: Stack = make_stack(
        rows_of(root),
        "exact_answer",
        model={"path": str(model), "device": "cpu"},
        images={"roots": [str(root)]},
        producer={"samples_per_version": 8, "max_in_flight": 64, "group_size": 2},
        policy={"enabled": policy},
        trainer={"learning_rate": 1e-3, "keep_rollouts": None},
    )
    for role in ("produce", "worker", "consume"):
        stack.start(role)
    stack.wait(lambda now: now.committed >= 2 * ROWS, "all rows to be decoded")
    gone = stack.rows[2]["images"][0]
    (root / gone).unlink()
    stack.start("train")
    now = stack.finish()
    lost = stack.expected([stack.rows[2]])
    assert Counter(stack.trained()) == Counter(stack.expected() - lost)
    assert now.reasons == {"dropped:image_failed": len(lost)}
    with stack.client() as client:
        assert_named(client, stack, lost, gone)
    samples = [sample for _, batch in read_rollouts(stack.run_dir / "rollouts") for sample in batch.samples]
    assert sum(len(sample.images) for sample in samples) == 2 * sum(len(row["images"]) for row in stack.rows) - 2
    assert all(ref.sha256 for sample in samples for ref in sample.images), "stamped by the worker"
    stack.assert_streams_empty()
    if policy:  # wrong answers are taught from the truth alone: nothing that was sampled is left to audit
        done = stack.sluice("audit", str(stack.run_dir), "--json")
        assert done.wait() == 0, done.tail()
        found = json.loads(done.text()[done.text().index("{") :])
        assert (found["wrong"], found["unchecked"], found["sequences"]) == (0, 0, len(samples))


def assert_named(client: redis.Redis, stack: Stack, lost: set[str], gone: str) -> None:
    raw: Any = client
    entries = [fields[b"d"] for _, fields in raw.xrange(stack.keys.dropped)]
    assert len(entries) == len(lost)
    assert all(gone.encode() in entry for entry in entries)


def test_a_policy_run_on_pictures_has_every_number_right_with_updates_within_sequences(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    """Vision tower and decoder learn, scorers score under versions in between; the audit recomputes all of it."""
    root, model = tmp_path / "scans", save_tiny_qwen3_vl(tmp_path / "qwen3-vl")
    stack: Stack = make_stack(
        rows_of(root, 22, 20),
        "exact_answer",
        model={"path": str(model), "device": "cpu"},
        images={"roots": [str(root)]},
        policy={"enabled": True},
        producer={"group_size": 4, "samples_per_version": 8, "max_in_flight": 88, "max_staleness": 10},
        worker={"checkpoint_tokens": 16, "max_batch": 4, "logprobs_mode": "processed", "lease_s": 2 * RUN_S},
        sampling={"temperature": 0.8, "max_new_tokens": 80},
        trainer={"learning_rate": 3e-3, "keep_rollouts": None, "freeze_vision": False},
        weights={"retention": 1000},
        rollout_matching={"task": "exact_answer", "target": "tests.chaos.policy_task:target"},
    )

    def start(role: str) -> Process:
        return stack.sluice(role, "-c", str(stack.config_file), PYTHONPATH=str(ROOT))

    roles = {role: start(role) for role in ("train", "score", "produce")}
    command = [sys.executable, "-m", "tests.e2e.stopping_worker", str(REPORT), "worker", "-c", str(stack.config_file)]
    worker = stack.spawn(command, name="worker", PYTHONPATH=str(ROOT))
    # Stopped amid sequences, and far enough ahead that ended ones are older than the trainer's own weights can score.
    stack.wait(lambda now: is_stopped(worker.popen.pid), "the worker to stop itself")
    assert stack.snapshot().committed >= 24, "the third step has results of the first weights"
    start("consume")
    stack.wait(lambda now: now.latest_version is not None and now.latest_version >= 2, "two updates")
    resume(worker)
    stack.wait(lambda now: now.complete and now.state == "finished", "the end of the run")
    roles["score"].terminate()
    roles["score"].expendable = True
    stack.finish()
    stack.assert_exactly_once()
    done = stack.sluice("audit", str(stack.run_dir), "--json")
    assert done.wait() == 0, done.tail()
    found = json.loads(done.text()[done.text().index("{") :])
    assert (found["wrong"], found["unchecked"], found["not_checked"]) == (0, 0, []), found
    assert found["told_apart"] > 0.2 * found["tokens"], "the versions hardly differ, so that nothing was shown"
    assert len(found["versions_per_sequence"]) > 1, "no update came within a sequence"
    scored = [step.get("policy/scored_tokens", 0) for step in read_steps(stack.run_dir / "metrics.jsonl")]
    assert sum(scored) > 0, "no score job was answered"
