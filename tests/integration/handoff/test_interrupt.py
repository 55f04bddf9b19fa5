"""Ctrl-C in a loop that waits for batches: it ends at once, and the role is free."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from sluice.pipeline.config import resolved_yaml
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.e2e.processes import environment, launch
from tests.training_loops import MakeRun

LOOP = """
import sys
from sluice.consumers.training.handoff import Rollouts
with Rollouts(sys.argv[1]) as rollouts:
    print("open", flush=True)
    next(rollouts.batches())
"""


def test_ctrl_c_ends_a_loop_that_waits(make_run: MakeRun, sync_client: Any, keys: Keys, tmp_path: Path) -> None:
    config = make_run(0, last=False, batch_wait_s=100.0)
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    command = [sys.executable, "-c", LOOP, str(tmp_path / "config.yaml")]
    process = launch(command, name="loop", log=tmp_path / "log", env=environment("loop"), cwd=Path.cwd())
    try:
        until = time.monotonic() + HANG_S
        while not _waits(sync_client, keys):
            assert process.popen.poll() is None, process.tail()
            assert time.monotonic() < until, process.tail()
            time.sleep(0.05)
        process.popen.send_signal(2)
        assert process.wait(HANG_S) != 0
        assert "KeyboardInterrupt" in process.text()
        assert not sync_client.exists(f"{keys.owner}trainer")
        assert not sync_client.hlen(keys.processes)
    finally:
        if process.popen.poll() is None:
            process.kill()


def _waits(client: Any, keys: Keys) -> bool:
    return any(b"training batches from the consumers" in row for row in client.hvals(keys.processes))
