"""Real trackers: what their own files hold after a trainer was stopped and another went on."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sluice.consumers.training import trackers
from sluice.consumers.training.trackers import Trackers
from sluice.pipeline.config.types import Config, TrackingConfig
from sluice.pipeline.errors import ConfigError
from tests.deadlines import HANG_S

LOSS = "train/loss"


def config(run_dir: Path, **tracking: Any) -> Config:
    return Config(run="r", run_dir=str(run_dir), tracking=TrackingConfig(**tracking))


async def train(config: Config, steps: range, scale: float) -> None:
    async with Trackers(config, close_s=HANG_S) as all_:
        for step in steps:
            all_.log(step, {LOSS: step * scale, "rollout/f1": 0.5})


def test_both_go_on_where_a_trainer_stopped_and_hold_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one makes step 3 again, as after a kill between a step and its checkpoint."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", str(HANG_S))
    monkeypatch.setattr(trackers, "_CLOSE_S", HANG_S)
    both = config(tmp_path, tensorboard=True, wandb=True, project="p")
    asyncio.run(train(both, range(1, 4), 1.0))
    begun = int(time.time())
    while int(time.time()) == begun:  # W&B names a run's folder by the second in which it began
        time.sleep(0.01)
    asyncio.run(train(both, range(3, 6), 10.0))
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars(LOSS)] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert [e.step for e in events.Scalars("rollout/f1")] == [1, 2, 3, 4, 5]
    kept = sorted((tmp_path / "r" / "wandb").glob("offline-run-*/*.wandb"))
    runs, steps = set[tuple[str, str, str]](), dict[int, float]()
    for record in (record for path in kept for record in ended_run(path)):
        if record.WhichOneof("record_type") == "run":
            runs.add((record.run.run_id, record.run.display_name, record.run.project))
        elif record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            assert int(values["_step"]) not in steps, "written twice"
            steps[int(values["_step"])] = float(values[LOSS])
    assert steps == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: 50.0}, "W&B cannot take a step back: the first one stays"
    ((identity, name, project),) = runs
    assert (name, project) == ("r", "p")
    assert identity in (tmp_path / "r" / "tracking" / "wandb.json").read_text()


def ended_run(path: Path) -> list[Any]:
    """Its records, once it has all: W&B's own process may write the last ones after the run's `finish`."""
    deadline = time.monotonic() + HANG_S
    while not (records := list(wandb_records(path))) or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{path} has no end: {records}"
        time.sleep(0.01)
    return records


def wandb_records(path: Path) -> Iterator[Any]:
    """A file of an offline run: LevelDB's log format, a record that is split among blocks put together again."""
    proto: Any = import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole, block = path.read_bytes(), 7, b"", 32_768
    while at + 7 <= len(data):
        if (left := block - at % block) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):  # it is being written
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, whole = proto.Record.FromString(whole), b""
            yield record


@pytest.mark.skipif(find_spec("trackio") is not None, reason="it is installed here")
def test_a_tracker_that_is_not_installed_is_an_error_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracking.trackio .*pip install 'trackio[<>=]"):
        Trackers(config(tmp_path, trackio=True))


def test_a_tracker_that_fails_is_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "tensorboard").write_text("a file where the folder should be")
    with capture_logs() as logs:
        asyncio.run(train(config(tmp_path, tensorboard=True), range(1, 50), 1.0))
    assert [(entry["log_level"], entry["tracker"]) for entry in logs] == [("warning", "tensorboard")]
    assert logs[0]["cause"]


def test_no_tracker_is_no_thread_and_no_file(tmp_path: Path) -> None:
    asyncio.run(train(config(tmp_path), range(1, 3), 1.0))
    assert list(tmp_path.iterdir()) == []
