"""The broker is killed in mid-run and comes back: every process waits for it, none ends, nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos.blows import PATIENT
from tests.e2e.fixtures import detection_rows
from tests.e2e.stack import Stack
from tests.killable_broker import KillableBroker

_DOWN_S = 3.0  # longer than a lease: what was held then is claimed again


def test_a_broker_that_is_killed_and_comes_back_costs_nothing(
    tmp_path: Path, model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "broker"
    data.mkdir()
    broker = KillableBroker(data)
    broker.start()
    stack = Stack(tmp_path, broker.url, model_dir, detection_rows(48), "detection")
    stack.configure(worker={**PATIENT, "lease_s": 2, "renew_s": 0.5}, sampling={"max_new_tokens": 60})
    try:
        started = [stack.start(role) for role in ("produce", "consume", "train", "worker", "worker")]
        for share in (8, 24):
            stack.wait(lambda now, share=share: now.committed >= share, f"{share} sequences decoded")
            broker.kill()
            time.sleep(_DOWN_S)
            broker.start()
        stack.finish()
        stack.assert_exactly_once()
        assert all(process.popen.poll() is not None and not process.expendable for process in started)
    finally:
        stack.close()
        broker.kill()
