"""Ctrl-C: everything ends, nothing is half-written, and the same command goes on from there."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from sluice.demo.digits.warm_start import WarmStartSettings, warm_start_key
from sluice.pipeline.broker.embedded import embedded_broker
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import Process, wait_gone
from tests.e2e.stack import ENDLESS, Stack


def wait_for(holds: object, cause: str, process: Process, stack: Stack) -> None:
    """Wait until a callable holds while a process runs."""
    until = time.monotonic() + RUN_S
    assert callable(holds)
    while not holds():
        assert process.popen.poll() is None, f"it ended before {cause}\n{process.tail()}"
        assert time.monotonic() < until, f"waited {RUN_S:.0f} s for {cause}\n{process.tail()}"
        time.sleep(0.02)


def interrupt(process: Process, stack: Stack) -> None:
    """SIGINT to the leader alone, as children have sessions of their own; nothing may stay."""
    process.expendable = True
    process.signal(signal.SIGINT)
    assert process.wait() == 130, process.tail()
    wait_gone(stack.mark)
    assert not stack.litter()
    assert not list(stack.directory.rglob("broker.json"))


def versions(directory: Path) -> int:
    """Of the runs in it; a walk of the whole tree would meet directories that the trainer removes just then."""
    return len(list(directory.glob("runs/*/weights/v??????/manifest.json")))


def test_an_interrupted_run_resumes_and_loses_nothing(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(16), embedded=True, data=ENDLESS)
    first = stack.start("run")
    wait_for(lambda: versions(stack.directory) > 2, "the third version", first, stack)
    interrupt(first, stack)
    assert "to continue: sluice run -c " in first.text()
    with embedded_broker(stack.config.broker) as url:
        stack.broker_url = url
        stack.end_data()
    stack.broker_url = None  # the run has its own
    second = stack.start("run")
    assert second.wait() == 0, second.tail()
    wait_gone(stack.mark)
    with embedded_broker(stack.config.broker) as url:
        stack.broker_url = url
        stack.assert_exactly_once()


def test_an_interrupted_start_leaves_nothing(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(8), embedded=True, data=ENDLESS)
    command = stack.start("run")
    wait_for(lambda: len(stack.alive()) > 3, "the first children", command, stack)
    interrupt(command, stack)


@pytest.mark.parametrize("moment", ["warm start", "pipeline"])
def test_an_interrupted_demo_leaves_nothing_half_done(make_stack: MakeStack, model_dir: Path, moment: str) -> None:
    stack = make_stack([], embedded=True)
    directory = stack.directory / "demo"
    target = directory / "cache" / f"digits-warm-{warm_start_key(WarmStartSettings())}"
    if moment == "pipeline":
        target.parent.mkdir(parents=True)
        untrained_digits_model(target)
    command = stack.sluice("demo", "--task", "digits", "--dir", str(directory))
    if moment == "warm start":
        wait_for(lambda: "warm start: step" in command.text(), "the first steps", command, stack)
    else:
        wait_for(lambda: versions(directory) > 0, "the first version", command, stack)
    interrupt(command, stack)
    assert [path.name for path in target.parent.iterdir()] == ([] if moment == "warm start" else [target.name])


def untrained_digits_model(target: Path) -> None:
    """What the warm start caches, before any training."""
    from sluice.demo.digits.model import ModelSettings, build_model, save_model
    from sluice.demo.digits.tokenizer import build_tokenizer

    codec = build_tokenizer()
    save_model(build_model(ModelSettings(), codec), codec, target)
