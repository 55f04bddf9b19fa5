"""`sluice run` while its broker dies, is gone at Ctrl-C, or comes back older than it was; and arq's own command."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from sluice.pipeline.broker.embedded import embedded_broker
from tests.chaos.blows import MANY, PATIENT, cut_rows, end_rows, newest_row
from tests.deadlines import HANG_S, RUN_S
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.processes import BIN, Process, wait_gone
from tests.e2e.stack import Stack
from tests.killable_broker import KillableBroker


@pytest.fixture
def outer(tmp_path: Path, model_dir: Path) -> Iterator[tuple[Stack, KillableBroker]]:
    """A run on a broker that the test can kill."""
    data = tmp_path / "broker"
    data.mkdir()
    broker = KillableBroker(data)
    broker.start()
    stack = Stack(tmp_path, broker.url, model_dir, detection_rows(MANY), "detection")
    worker, up = {**PATIENT, "lease_s": 2, "renew_s": 0.5}, {"stop_grace_s": 60.0}
    stack.configure(worker=worker, up=up, sampling={"max_new_tokens": 60})
    try:
        yield stack, broker
    finally:
        stack.close()
        broker.kill()


def wait(holds: Callable[[], Any], cause: str, process: Process, deadline_s: float = RUN_S) -> Any:
    """What a callable answers, once it is true; a broker that is away is no answer."""
    until = time.monotonic() + deadline_s
    while True:
        assert process.popen.poll() is None, f"it ended before {cause}\n{process.tail()}"
        assert time.monotonic() < until, f"waited {deadline_s:.0f} s for {cause}\n{process.tail()}"
        try:
            if found := holds():
                return found
        except (redis.RedisError, OSError, ValueError, KeyError):
            pass
        time.sleep(0.02)


def roles(stack: Stack) -> dict[str, int]:
    """Name → process id of every role that says it is alive."""
    return {row.name: row.pid for row in stack.snapshot().processes}


def test_a_run_survives_the_death_of_its_own_broker(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(MANY), embedded=True, worker=PATIENT, sampling={"max_new_tokens": 60})
    run = stack.start("run")
    card = stack.directory / "broker" / "broker.json"
    stack.broker_url = wait(lambda: json.loads(card.read_text())["url"], "the broker", run)
    trained = wait(lambda: stack.snapshot().trained, "the first steps", run)
    before = roles(stack)
    assert {"trainer", "consumer-0", "worker-0"} <= set(before)
    os.kill(json.loads(card.read_text())["pid"], signal.SIGKILL)
    wait(lambda: stack.snapshot().trained > trained + 24, "training to go on", run)
    after = roles(stack)
    assert {name: after[name] for name in before if name in after} == {n: before[n] for n in before if n in after}
    assert {"trainer", "consumer-0", "worker-0"} <= set(after)
    end_rows(stack)
    assert run.wait(RUN_S) == 0, run.tail()
    assert "the embedded broker is back" in run.text()
    wait_gone(stack.mark)
    with embedded_broker(stack.config.broker) as url:
        stack.broker_url = url
        stack.assert_exactly_once()


def test_an_interruption_while_the_broker_is_gone_takes_effect_at_once(outer: tuple[Stack, KillableBroker]) -> None:
    stack, broker = outer
    stack.configure(up={"stop_grace_s": 600.0}, broker={"retry_for_s": 600.0})
    run = stack.start("run")
    wait(lambda: stack.snapshot().trained > 0, "the first steps", run)
    broker.kill()
    wait(lambda: "the broker does not answer" in run.text(), "a word about the broker", run)
    run.expendable = True
    run.signal(signal.SIGINT)
    # Not after broker.retry_for_s nor up.stop_grace_s: nobody waits for a broker that is gone.
    assert run.wait(HANG_S) == 130, run.tail()
    assert "the broker is gone" in run.text()
    wait_gone(stack.mark)
    broker.start()
    stack.wait(lambda now: now.enqueued, "the broker to be back")
    cut_rows(stack)
    again = stack.start("run")
    assert again.wait(RUN_S) == 0, again.tail()
    stack.assert_exactly_once()


def test_a_producer_that_was_done_goes_over_its_rows_again_when_the_broker_lost_them(
    outer: tuple[Stack, KillableBroker],
) -> None:
    stack, _ = outer
    # The producer can be done before the first step, and the run isn't over before its worker is started.
    stack.configure(data={"limit": 48}, worker={"count": 0}, weights={"retention": 7})
    stack.configure(producer={"max_in_flight": 48, "max_staleness": 5})
    stack.rows = stack.rows[:48]
    run = stack.start("run")
    wait(lambda: stack.snapshot().exhausted, "the producer's end", run)
    wait(lambda: "producer" not in roles(stack), "its process to end", run)
    with stack.client() as client:  # what a power loss does to the last thing that was written
        client.hset(stack.keys.source, "exhausted", "0")
    wait(lambda: stack.snapshot().exhausted, "the producer to say it again", run)
    worker = stack.start("worker")
    assert run.wait(RUN_S) == 0, run.tail()
    worker.terminate()
    assert "reads its rows again" in run.text()
    stack.assert_exactly_once()


def announced(stack: Stack) -> bool:
    """Whether the worker's heartbeat says under which name its leases run."""
    return any(row.name == "worker-0" and "owner" in row.facts for row in stack.snapshot().processes)


def test_a_worker_that_dies_under_supervision_loses_its_leases_at_once(outer: tuple[Stack, KillableBroker]) -> None:
    stack, _ = outer
    stack.configure(worker={**PATIENT, "lease_s": 900, "renew_s": 60})
    run = stack.start("run")
    wait(lambda: announced(stack) and "worker-0" in stack.leased().values(), "a worker that holds jobs", run)
    os.kill(roles(stack)["worker-0"], signal.SIGKILL)
    wait(lambda: "leases of a dead process ended" in run.text(), "the supervisor to end its leases", run)
    end_rows(stack)
    # A lease that was left behind would block its job, and so the end of the run, for a quarter of an hour.
    assert run.wait(RUN_S) == 0, run.tail()
    stack.assert_exactly_once()


def test_arqs_own_command_survives_a_restart_of_the_broker(outer: tuple[Stack, KillableBroker]) -> None:
    stack, broker = outer
    for role in ("produce", "consume", "train"):
        stack.start(role)
    command = [str(BIN / "arq"), "sluice.workers.main.WorkerSettings"]
    worker = stack.spawn(command, name="arq", SLUICE_CONFIG=str(stack.config_file))
    for share in (8, 24):
        wait(lambda share=share: stack.snapshot().committed >= share, f"{share} sequences", worker)
        broker.kill()
        time.sleep(3)  # six polls of arq's
        broker.start()
    stack.wait(lambda now: now.enqueued, "the broker to be back")
    end_rows(stack)
    end = stack.finish()
    assert end.dead == 0
    stack.assert_exactly_once()


def test_arqs_own_command_ends_within_its_grace_time_when_the_broker_is_gone(
    outer: tuple[Stack, KillableBroker],
) -> None:
    stack, broker = outer
    stack.configure(up={"stop_grace_s": 2}, worker={"drain_s": 1})
    for role in ("produce", "consume", "train"):
        stack.start(role)
    command = [str(BIN / "arq"), "sluice.workers.main.WorkerSettings"]
    worker = stack.spawn(command, name="arq", SLUICE_CONFIG=str(stack.config_file))
    wait(lambda: stack.snapshot().committed, "the first sequences", worker)
    broker.kill()
    worker.expendable = True
    assert worker.terminate(HANG_S) == 1, worker.tail()  # far less than broker.retry_for_s
    assert "did not stop in time; exiting" in worker.text()


def test_a_run_whose_broker_is_flushed_trains_nothing_twice(outer: tuple[Stack, KillableBroker]) -> None:
    """Its roles say so and are started again; what is trained is known from the run's directory."""
    stack, broker = outer
    run = stack.start("run")
    wait(lambda: stack.snapshot().trained > 8, "the first steps", run)
    with redis.Redis(port=broker.port, socket_timeout=HANG_S) as admin:
        both: Any = admin.pipeline()
        [before, _] = both.hget(stack.keys.source, "cursor").flushdb().execute()
    wait(lambda: newest_row(stack) > int(before.partition(b":")[2]), "rows that were not there before", run)
    end_rows(stack)
    assert run.wait(RUN_S) == 0, run.tail()
    trained = stack.trained()
    assert len(trained) == len(set(trained))
    assert set(trained) == stack.expected()
    log = (stack.run_dir / "logs" / "trainer.log").read_text()
    assert "the broker's data are gone" in log
    assert "another process" not in log
