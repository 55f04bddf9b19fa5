"""What a user does wrong: each ends with its exit code and a message that names the place, or is counted."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from sluice.pipeline.files import write_atomic
from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.stack import Stack


def spoil_line(stack: Stack, number: int) -> None:
    """Replace one line of the data by something that is no row."""
    lines = stack.data.read_text().splitlines()
    lines[number - 1] = '{"messages": [{"role": "user"'
    write_atomic(stack.data, "\n".join(lines) + "\n")


def test_a_malformed_line_stops_the_run_and_is_named(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(8), embedded=True)
    spoil_line(stack, 5)
    alone, whole = stack.start("broker"), None
    while "broker ready" not in alone.text():
        assert alone.popen.poll() is None, alone.tail()
        time.sleep(0.02)
    producer = stack.start("produce")
    assert producer.wait() == 3, producer.tail()
    assert f"error: 1 of 8 rows malformed, the first at {stack.data}:5: malformed row" in producer.text()
    whole = stack.start("run")
    assert whole.wait() == 3, whole.tail()
    assert f"{stack.data}:5: malformed row" in whole.text()


def test_everything_wrong_is_said_before_anything_starts(make_stack: MakeStack) -> None:
    """A model that isn't there, a bad line far from the first, functions that don't import or always fail, a typo."""
    patient = {"max_s": RUN_S}  # a check that isn't over in time is no problem
    stack = make_stack(detection_rows(5000), embedded=True, preflight=patient)
    spoil_line(stack, 5000)
    (stack.directory / "own.py").write_text("def match(parsed, truth, ctx):\n    raise RuntimeError('boom')\n")
    own = ["--set", "rollout_matching.match=own:match"]
    whole = stack.start("run", "--model", "nosuch", "--set", "rollout_matching.parse=own:prase", *own)
    failing = stack.start("up", "--set", "data.on_malformed=skip", *own)
    typos = stack.start("run", "--set", "worker.cuont=2", "--set", "trainer.learning_rat=1")
    for command, code, words in (
        (whole, 5, ["3 problems; nothing was started", "nosuch: no such dir", f"{stack.data}:5000: mal", "no 'prase'"]),
        (failing, 3, ["each of the first 4 rows would be dropped", "RuntimeError: boom"]),
        (typos, 2, ["3 problems", "'count'", "'learning_rate'", f"{stack.data}:5000: mal"]),
    ):
        assert command.wait() == code, command.tail()
        for word in words:
            assert word in command.text(), (word, command.tail())
    assert not (stack.directory / "broker").exists()
    assert not stack.run_dir.exists()


def test_bad_rows_are_counted_and_the_others_are_trained(make_stack: MakeStack) -> None:
    """A malformed line, a truth that is no list of objects, and a model that writes garbage."""
    rows = detection_rows(32)
    rows[3]["truth"] = {"desc": "not a list"}
    rows[4]["truth"] = "text"
    stack = make_stack(rows, data={"on_malformed": "skip"})
    spoil_line(stack, 32)
    command = stack.start("run")
    assert command.wait() == 0, command.tail()
    now = stack.snapshot()
    assert (now.malformed_rows, now.enqueued, now.trained, now.dropped) == (1, 31, 29, 2)
    assert now.reasons == {"dropped:invalid_truth": 2}
    good = [row for at, row in enumerate(rows) if at not in (3, 4, 31)]
    assert set(stack.trained()) == stack.expected(good)
    assert len(stack.trained()) == 29
    assert now.metrics["stage2/invalid_rollout"] > 0, "random weights write no valid answer"
    again = stack.start("produce")
    assert again.wait() == 0, again.tail()
    assert stack.snapshot().malformed_rows == 1, "a second look at the same row counts it once"


def test_a_typo_in_the_configuration(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(1))
    stack.configure(trainer={"learning_rat": 1})
    command = stack.start("run")
    assert command.wait() == 2, command.tail()
    assert f"error: {stack.config_file}: " in command.text()
    assert "trainer.learning_rat" in command.text()
    assert "learning_rate" in command.text()


def test_a_model_directory_without_weights(make_stack: MakeStack, model_dir: Path, tmp_path: Path) -> None:
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    for file in model_dir.iterdir():
        if file.suffix != ".safetensors":
            (hollow / file.name).write_bytes(file.read_bytes())
    stack = make_stack(detection_rows(8), model={"path": str(hollow)})
    for command in (stack.start("run"), stack.start("worker")):
        assert command.wait() == 5, command.tail()
        assert f"{hollow}: no " in command.text()


def test_a_broker_that_is_not_there(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(1), embedded=True, broker={"retry_for_s": 3})
    with socket.socket() as taken:  # bound and never listening: nothing else answers there
        taken.bind(("127.0.0.1", 0))
        stack.broker_url = f"redis://:secret@127.0.0.1:{taken.getsockname()[1]}/0"
        commands = [stack.start(role) for role in ("produce", "status", "run")]
        for command in commands:
            assert command.wait() == 4, command.tail()
            assert "the broker does not answer" in command.text()
            assert "secret" not in command.text()
    stack.broker_url = None
    lonely = stack.start("produce")
    assert lonely.wait() == 4
    assert "no broker: REDIS_URL and broker.url are not set" in lonely.text()
