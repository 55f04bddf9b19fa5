"""A run with a policy loss while its processes are killed: each sequence trained once, and every number right."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sluice.bench.truth.architectures import save
from sluice.consumers.training.step_log import read_steps
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.processes import BIN, Process, environment
from tests.e2e.stack import Stack

pytestmark = pytest.mark.chaos
ROOT = Path(__file__).parents[2]
GROUP = 4
POLICY: dict[str, Any] = {
    "policy": {"enabled": True, "score_wait_s": RUN_S},  # a scorer may be long in starting
    "producer": {"group_size": GROUP, "samples_per_version": 8, "max_in_flight": 32, "max_staleness": 3},
    "worker": {"checkpoint_tokens": 16, "lease_s": 2, "max_batch": 4, "logprobs_mode": "processed"},
    "scorer": {"lease_s": 2},
    "sampling": {"temperature": 0.8, "max_new_tokens": 80},
    "trainer": {"learning_rate": 3e-3, "keep_rollouts": None},
    "weights": {"retention": 1000},
    "rollout_matching": {"task": "exact_answer", "target": "tests.chaos.policy_task:target"},
}


def start(stack: Stack, role: str) -> Process:
    return stack.sluice(role, "-c", str(stack.config_file), PYTHONPATH=str(ROOT))


def audit(stack: Stack, deadline_s: float = RUN_S) -> dict[str, Any]:
    command = [str(BIN / "sluice"), "audit", str(stack.run_dir), "--json"]
    done = subprocess.run(command, env=environment(stack.mark), capture_output=True, text=True, timeout=deadline_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_every_number_is_right_whatever_is_killed(make_stack: MakeStack, tmp_path: Path) -> None:
    """Worker and trainer die; the audit recomputes every logprob that was trained on from the weights.

    Of a model whose windows are much shorter than its rows.
    """
    model = {"model": {"path": str(save("Gemma3", tmp_path / "model")), "device": "cpu"}}
    stack = make_stack(text_rows(22), "exact_answer", **POLICY, **model)
    roles = {role: start(stack, role) for role in ("train", "score", "consume", "produce")}
    # So far ahead is the worker then that the first updates come in its midst, however slow a step is.
    stack.wait(lambda now: now.latest_version == 0 and now.enqueued == 32, "a version, and all jobs that may wait")
    roles["worker"] = start(stack, "worker")
    for goal, victim in ((16, "worker"), (40, "train")):
        stack.wait(lambda now, least=goal: now.trained >= least, f"{goal} trained sequences")
        roles[victim].kill()
        roles[victim] = start(stack, victim)
    stack.wait(lambda now: now.complete and now.state == "finished", "the end of the run")
    roles["score"].terminate()
    roles["score"].expendable = True
    stack.finish()
    stack.assert_exactly_once()
    found = audit(stack)
    assert (found["wrong"], found["unchecked"]) == (0, 0), found
    assert found["right"] + found["marked"] == found["tokens"]
    assert found["max_error"] < 1e-4
    assert found["told_apart"] > 0.2 * found["tokens"], "the versions hardly differ, so that nothing was shown"
    assert len(found["versions_per_sequence"]) > 1, "no update came amid a sequence"
    steps = read_steps(stack.run_dir / "metrics.jsonl")
    assert all(step["policy/tokens"] > 0 for step in steps)
    assert (
        max(step["policy/engine_logprob_gap_max"] for step in steps if "policy/engine_logprob_gap_max" in step) < 1e-3
    )
