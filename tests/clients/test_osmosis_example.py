"""The end-to-end suite of Osmosis' reference example, unmodified, against our rollout server and our gateway.

Its address of a trainer (port 9001) is the gateway's here, with a worker behind it, in place of its mock; its
tokenizer's name is mapped to our model's directory. The suite's later revisions read their answers from a route of that
mock, so it is the one of the synchronous protocol: commit 97f4fb8 of Osmosis-AI/osmosis-remote-rollout-example.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.demo.tiny.model import ModelSettings
from sluice.demo.tools.problems import Step
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, make_stack, model_dir
from tests.tool_models import Conversation, tool_model

__all__ = ["make_stack", "model_dir"]
CHECKOUT = os.environ.get("SLUICE_OSMOSIS_EXAMPLE", "")
SERVER, TRAINER = 9000, 9001  # fixed in the suite
NAME = "Qwen/Qwen3-8B"
ASKED = [
    Conversation("Say hello!", [], "hello", "You are a helpful assistant."),
    Conversation(
        "Please calculate 5 plus 3.",
        [Step("add", 5, 3, 8)],
        "8",
        "You are a helpful calculator assistant with access to calculator tools.",
    ),
    Conversation("Calculate 1 plus 1.", [Step("add", 1, 1, 2)], "2", "You are a calculator assistant."),
    Conversation("Add 5 and 3.", [Step("add", 5, 3, 8)], "8", "You are a calculator assistant."),
]
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="not run: SLUICE_OSMOSIS_EXAMPLE is not a checkout of 97f4fb8")


def test_its_own_suite_passes(make_stack: MakeStack, tmp_path: Path) -> None:
    for port in (SERVER, TRAINER):
        with contextlib.closing(socket.socket()) as probe:
            assert probe.connect_ex(("127.0.0.1", port)), f"port {port}, which the suite needs, is in use"
    model = tool_model(
        tmp_path, ASKED, num_steps=600, stop_loss=0.001, model=ModelSettings(64, 128, 2, 2, max_positions=4096)
    )
    stack = make_stack(
        [], "exact_answer", model={"path": str(model)},
        gateway={"port": TRAINER},
        rollout_server={"port": SERVER, "hosts": [f"localhost:{TRAINER}"], "tokenizers": {NAME: str(model)}},
    )  # fmt: skip
    for role in ("gateway", "rollout-server", "worker"):
        stack.start(role)
    stack.wait(lambda now: len(now.alive("worker")) and len(now.alive("gateway")), "a worker and a gateway")
    project = Path(CHECKOUT) / "rollout_server"
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/e2e"],
        cwd=project, env={**os.environ, "PYTHONPATH": str(project / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert "6 passed" in suite.stdout, suite.stdout + suite.stderr + stack.report(stack.snapshot())
