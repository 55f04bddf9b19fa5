"""When the demo kills a worker: a real process, by what the run's state says of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.demo.drill import Drill
from sluice.demo.tasks import load_task
from sluice.pipeline.config.types import Config, UpConfig, WorkerConfig
from sluice.pipeline.run.progress_panel import Progress
from sluice.pipeline.run.supervisor import Supervisor
from sluice.pipeline.status.snapshot import Process, Snapshot
from tests.deadlines import HANG_S


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("committed", "age_s", "heldout", "killed"),
    [
        pytest.param(960, 0.1, 0, True, id="a quarter through"),
        pytest.param(950, 0.1, 0, False, id="before that"),
        pytest.param(960, 0.9, 0, False, id="by an old heartbeat"),
        pytest.param(960, 0.1, 84, False, id="what it decodes may be held-out prompts alone"),
        pytest.param(1920, 0.9, 84, True, id="half through, whatever it decodes"),
    ],
)
async def test_the_kill_hits_training_rollouts(
    tmp_path: Path, victim: subprocess.Popen[bytes], committed: int, age_s: float, heldout: int, killed: bool
) -> None:
    config = Config(run=tmp_path.name, run_dir=str(tmp_path.parent), worker=WorkerConfig(count=2, max_batch=64))
    drill = Drill(load_task("pictures"), config, tmp_path / "evals.jsonl", kill=True)
    boss = Supervisor(UpConfig(), tmp_path, {})
    boss.add("worker-1", [])
    boss.children["worker-1"].process = victim
    await drill.watch(state(victim.pid, committed, age_s, heldout), boss, Progress("demo"))
    assert (drill.kill is not None) == killed
    if drill.kill:
        assert (drill.kill.running, drill.kill.heldout) == (60, heldout)
        assert victim.wait(HANG_S) == -9


def state(pid: int, committed: int, age_s: float, heldout: int) -> Snapshot:
    fields: dict[str, Any] = {"role": "worker", "name": "worker-1", "pid": pid, "host": "vm", "started": 0.0}
    worker = msgspec.convert({**fields, "at": 100.0, "age_s": age_s, "facts": {"running": 60}}, Process)
    counts: dict[str, Any] = {"committed": committed, "total": 3840, "evaluating_jobs": heldout}
    return Snapshot(run="r", state="running", at=100.0, processes=[worker], **counts)
