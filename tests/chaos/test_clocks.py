"""Hosts whose clocks are an hour off, by Debian's libfaketime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.test_policy_run import GROUP, POLICY, ROOT, audit, start
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.processes import Process
from tests.e2e.stack import Stack
from tests.hosts.clocks import LIBRARY, NEEDED, clock

pytestmark = pytest.mark.chaos


def start_ahead(stack: Stack, role: str) -> Process:
    """All its clocks and the times of its files are an hour ahead."""
    return stack.sluice(role, "-c", str(stack.config_file), name=role, PYTHONPATH=str(ROOT), **clock("+1h"))


@pytest.mark.skipif(LIBRARY is None, reason=NEEDED)
def test_no_clock_decides_under_which_weights_a_token_is_sampled(make_stack: MakeStack, tmp_path: Path) -> None:
    """One worker is an hour ahead; so is the trainer that follows the killed one, and for it all others are behind."""
    weights = {"retention": 1000, "transport": "delta", "store_url": (tmp_path / "store").as_uri(), "anchor_every": 4}
    tree: dict[str, Any] = {**POLICY, "weights": {**weights, "cache_dir": str(tmp_path / "cache"), "cache_gb": 1}}
    stack = make_stack(text_rows(16), "exact_answer", **tree)
    trainer, scorer = start(stack, "train"), start(stack, "score")
    start_ahead(stack, "worker")
    start(stack, "worker")
    start(stack, "consume")
    start(stack, "produce")
    stack.wait(lambda now: now.trained >= 16, "16 trained sequences")
    trainer.kill()
    start_ahead(stack, "train")
    stack.wait(lambda now: now.complete and now.state == "finished", "the end of the run")
    scorer.terminate()
    scorer.expendable = True
    stack.finish()
    stack.assert_exactly_once()
    assert stack.snapshot().trained == 16 * GROUP
    found = audit(stack)
    assert (found["wrong"], found["unchecked"]) == (0, 0), found
    assert found["right"] > 0
    assert found["told_apart"] > 0
