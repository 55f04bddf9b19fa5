"""Ranks of a trainer that die in a phase of a step."""

from __future__ import annotations

import sys
from collections import Counter

from tests.deadlines import RUN_S
from tests.e2e.processes import Process
from tests.e2e.stack import Stack


def start_and_kill(stack: Stack, phase: str, victim: int, ranks: int) -> Process:
    directory = stack.directory / f"{phase}-{victim}"
    directory.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, "-m", "tests.dying_rank", phase, str(victim), str(directory)]
    started = stack.spawn([*command, "train", "-c", str(stack.config_file)], name="dying")
    started.expendable = True
    assert started.wait(RUN_S) != 0, started.tail()
    assert f"local_rank: {victim}" in started.text(), started.tail()
    assert "Signal 9 (SIGKILL)" in started.text(), started.tail()
    return started


def assert_each_once(stack: Stack, steps: int) -> None:
    """After a last start, on one rank."""
    last = stack.start("train")
    assert last.wait(RUN_S) == 0, last.tail()
    counted = Counter(stack.trained())
    assert len(counted) == 2 * steps
    assert set(counted.values()) == {1}
    assert stack.snapshot().trained == 2 * steps
    assert not stack.litter()
