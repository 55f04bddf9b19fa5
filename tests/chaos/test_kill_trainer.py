"""The trainer killed at any moment: each sequence trained once, no version number with two digests."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.messages import WeightVersion
from pipeline.weights import digest_of, write_version
from tests.chaos.blows import seeded
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import Process
from tests.e2e.stack import Stack

pytestmark = pytest.mark.chaos


def start_all_but_the_trainer(stack: Stack) -> None:
    for role in ("worker", "consume", "produce"):
        stack.start(role)


def test_killed_at_random_moments(make_stack: MakeStack) -> None:
    dice = seeded()
    stack = make_stack(detection_rows(160))
    start_all_but_the_trainer(stack)
    seen: dict[int, str] = {}
    for goal in (8, 48, 96):
        trainer = stack.start("train")
        stack.wait(lambda now, least=goal: now.trained >= least, f"{goal} trained sequences")
        time.sleep(dice.uniform(0, 0.1))
        trainer.kill()
        assert seen.items() <= stack.digests().items(), "a version number has two digests"
        seen = stack.digests()
    stack.start("train")
    stack.finish()
    assert seen.items() <= stack.digests().items(), "a version number has two digests"
    stack.assert_exactly_once()
    assert not stack.litter()


def die_between_checkpoint_and_publish(stack: Stack, version: int, model: Path) -> Path:
    """Other weights stand where the version goes, so the trainer ends right before it; returns the checkpoint."""
    obstacle = stack.run_dir / "weights" / f"v{version:06d}"
    write_version(model, obstacle.parent, WeightVersion(version=version, path="", digest=""))
    trainer = stack.start("train")
    trainer.expendable = True
    assert trainer.wait() == 6, trainer.tail()
    assert "already holds other weights" in trainer.text()
    shutil.rmtree(obstacle)
    newest = sorted((stack.run_dir / "checkpoints").glob("step-*"))[-1]
    assert newest.name == f"step-{version:06d}"
    assert stack.snapshot().latest_version == version - 1
    return newest


def test_dead_between_checkpoint_and_publish_publishes_the_same_weights(make_stack: MakeStack, model_dir: Path) -> None:
    stack = make_stack(detection_rows(40))
    start_all_but_the_trainer(stack)
    checkpoint = die_between_checkpoint_and_publish(stack, 3, model_dir)
    expected = digest_of(checkpoint)
    forget_versions(stack)
    before = stack.digests()
    stack.start("train")
    stack.wait(lambda now: (now.latest_version or 0) >= 3, "version 3")
    assert stack.digests()[3] == expected
    assert before.items() <= stack.digests().items()
    stack.finish()
    assert set(stack.trained()) == stack.expected()
    assert len(stack.trained()) == 40


def forget_versions(stack: Stack) -> None:
    """What a power loss of the broker's host may do: the newest registration is undone."""
    with stack.client() as client:
        raw: Any = client
        raw.hdel(stack.keys.versions, "2", "2:digest")
        raw.set(stack.keys.latest, 1)
        raw.delete(stack.keys.latest)


@pytest.mark.parametrize("moment", ["midway", "at the end"])
def test_a_paused_trainer_is_replaced_and_writes_nothing_when_it_comes_back(make_stack: MakeStack, moment: str) -> None:
    stack = make_stack(detection_rows(96))
    start_all_but_the_trainer(stack)
    paused = stack.start("train")
    stack.wait(lambda now: now.trained >= 8, "a first step")
    paused.expendable = True
    paused.signal(signal.SIGSTOP)
    second = stack.start("train")
    stack.wait(lambda _: "published" in second.text(), "the second trainer to take over")
    if moment == "at the end":
        stack.wait(lambda now: now.state == "finished", "the second trainer to end the run")
        assert second.wait() == 0, second.tail()
    seen = stack.digests()
    paused.signal(signal.SIGCONT)
    assert_it_gave_up(paused)
    stack.finish()
    assert seen.items() <= stack.digests().items(), "a version number has two digests"
    stack.assert_exactly_once()


def assert_it_gave_up(trainer: Process) -> None:
    assert trainer.wait(60) == 1, trainer.tail()
    assert "another" in trainer.text()
    assert "this one" in trainer.text()
