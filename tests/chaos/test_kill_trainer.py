"""The trainer killed at any moment: each sequence trained once, no version number with two digests."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from sluice.pipeline.weights.shared_memory import MEMORY
from sluice.pipeline.weights.versions import digest_of
from tests.chaos.blows import MANY, end_rows, seeded
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import Process
from tests.e2e.stack import Stack

pytestmark = pytest.mark.chaos


def start_all_but_the_trainer(stack: Stack) -> None:
    for role in ("worker", "consume", "produce"):
        stack.start(role)


@pytest.mark.parametrize("transport", ["directory", "engine"])
def test_killed_at_random_moments(make_stack: MakeStack, transport: str) -> None:
    dice = seeded()
    stack = make_stack(detection_rows(MANY), weights={"transport": transport})
    start_all_but_the_trainer(stack)
    seen: dict[int, str] = {}
    for goal in (8, 56):
        trainer = stack.start("train")
        stack.wait(lambda now, least=goal: now.trained >= least, f"{goal} trained sequences")
        time.sleep(dice.uniform(0, 0.1))
        trainer.kill()
        assert seen.items() <= stack.digests().items(), "a version number has two digests"
        seen = stack.digests()
    stack.start("train")
    if transport == "engine":
        stack.wait(lambda now: len(in_memory(stack)) == 2, "the trainer and its worker to have memory")
    end_rows(stack)
    stack.finish()
    assert seen.items() <= stack.digests().items(), "a version number has two digests"
    stack.assert_exactly_once()
    assert not stack.litter()
    assert not in_memory(stack), "what killed trainers left is gone as well"


def in_memory(stack: Stack) -> list[Path]:
    """The processes of this run that have versions in shared memory."""
    return [path.parent for path in MEMORY.glob(f"sluice-{stack.run}-*/owner")]


def die_between_checkpoint_and_publish(stack: Stack) -> Path:
    """Start a trainer that kills itself there; returns the checkpoint."""
    command = [sys.executable, "-m", "tests.dying_rank", "publish", "0", str(stack.directory)]
    trainer = stack.spawn([*command, "train", "-c", str(stack.config_file)], name="dying", RANK="0")
    trainer.expendable = True
    assert trainer.wait(RUN_S) == -signal.SIGKILL, trainer.tail()
    newest = max((stack.run_dir / "checkpoints").glob("step-*"))
    assert stack.snapshot().latest_version == int(newest.name.removeprefix("step-")) - 1
    return newest


def test_dead_between_checkpoint_and_publish_publishes_the_same_weights(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(96))
    start_all_but_the_trainer(stack)
    checkpoint = die_between_checkpoint_and_publish(stack)
    version, expected = int(checkpoint.name.removeprefix("step-")), digest_of(checkpoint)
    before = stack.digests()
    stack.start("train")
    stack.wait(lambda now: (now.latest_version or 0) >= version, "the version of that checkpoint")
    assert stack.digests()[version] == expected
    assert before.items() <= stack.digests().items()
    stack.finish()
    assert set(stack.trained()) == stack.expected()
    assert len(stack.trained()) == 96


def test_paused_trainers_are_replaced_and_write_nothing_when_they_come_back(make_stack: MakeStack) -> None:
    """The first one in the middle of the run, the second one after its end."""
    stack = make_stack(detection_rows(MANY))
    start_all_but_the_trainer(stack)
    first = stack.start("train")
    stack.wait(lambda now: now.trained >= 8, "a first step")
    pause(first)
    second = successor(stack)
    pause(second)
    seen = stack.digests()
    first.signal(signal.SIGCONT)
    assert_it_gave_up(first)
    third = successor(stack)
    end_rows(stack)
    stack.wait(lambda now: now.state == "finished", "the third trainer to end the run")
    assert third.wait() == 0, third.tail()
    assert seen.items() <= stack.digests().items(), "a version number has two digests"
    seen = stack.digests()
    second.signal(signal.SIGCONT)
    assert_it_gave_up(second)
    stack.finish()
    assert seen.items() <= stack.digests().items(), "a version number has two digests"
    stack.assert_exactly_once()


def pause(trainer: Process) -> None:
    trainer.expendable = True
    trainer.signal(signal.SIGSTOP)


def successor(stack: Stack) -> Process:
    """A trainer that has taken over."""
    trainer = stack.start("train")
    stack.wait(lambda _: "published" in trainer.text(), "another trainer to take over")
    return trainer


def assert_it_gave_up(trainer: Process) -> None:
    assert trainer.wait() == 1, trainer.tail()
    assert "another" in trainer.text()
    assert "took over this role" in trainer.text()
