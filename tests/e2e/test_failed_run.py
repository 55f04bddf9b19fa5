"""A run that gives up stores why, and every view of it says so until it is started again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from sluice.pipeline.status.run_end import read_end
from sluice.pipeline.status.snapshot import Snapshot
from tests.deadlines import HANG_S
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.processes import Process, wait_gone
from tests.e2e.stack import Stack
from tests.e2e.test_dashboard import get, poll

CAUSE = "consumer-0 ended once: killed (SIGKILL), perhaps for memory"
# `sluice`, whose last look at a run waits for a broker that stalls.
PATIENT = f"""
import sys
from sluice.pipeline.cli.main import main
from sluice.pipeline.run import stack

stack._LAST_LOOK_S = {HANG_S}
main(sys.argv[1:])
"""


def said(stack: Stack, code: int, *words: str) -> str:
    """What a command prints."""
    command = stack.sluice(*words)
    command.expendable = True
    assert command.wait() == code, command.tail()
    return " ".join(command.text().split())


def shown(stack: Stack, holds: str) -> str:
    """The first page of a dashboard that was started for the run's directory."""
    command: Process = stack.sluice("dashboard", str(stack.run_dir), "--set", "dashboard.port=0", name="look")
    command.expendable = True
    url = poll(lambda: re.search(r"http://[\d.:]+", command.text()), "its address", command)[0]
    page = poll(lambda: next((text for text in [get(url + "/")] if holds in text), ""), holds, command)
    command.terminate()
    command.wait()
    return page


def test_a_run_that_fails_says_why_from_its_directory_until_it_is_started_again(make_stack: MakeStack) -> None:
    stack = make_stack(text_rows(64), "exact_answer", data={"epochs": 100_000}, up={"max_restarts": 0})
    command = stack.spawn([sys.executable, "-c", PATIENT, "run", "-c", str(stack.config_file)], name="run")
    command.expendable = True

    def has_trained(now: Snapshot) -> bool:
        return now.trained >= 8 and bool(now.alive("consumer"))

    [consumer] = stack.wait(has_trained, "the first step").alive("consumer")
    os.kill(consumer.pid, signal.SIGKILL)
    assert command.wait() == 1, command.tail()
    assert f"error: {CAUSE}" in command.text()
    wait_gone(stack.mark)
    end = read_end(stack.run_dir)
    assert end is not None
    assert (end.state, end.exit_code, end.process) == ("failed", 1, "consumer-0")
    assert end.cause == CAUSE
    summary = json.loads((stack.run_dir / "summary.json").read_bytes())
    assert (summary["end"]["state"], summary["trained"] >= 8) == ("failed", True)

    assert f"run {stack.run}: failed" in (text := said(stack, 0, "status", str(stack.run_dir)))
    assert f"! the run failed: {CAUSE}" in text
    why = said(stack, 1, "status", str(stack.run_dir), "--why", "--json")
    assert (json.loads(why)["verdict"]["state"], json.loads(why)["stalls"][0]["kind"]) == ("failed", "run_failed")
    assert "logs/consumer-0.log in the run's directory" in said(stack, 1, "status", str(stack.run_dir), "--why")
    assert f"! the run failed: {CAUSE}" in said(stack, 0, "top", str(stack.run_dir), "--once")
    page = shown(stack, "Failed: ")
    assert f"<h1>Failed: {CAUSE}" in page
    assert '<span class="pill bad">failed</span>' in page
    assert page.count(CAUSE) == 1, "once on a page is enough"

    again = stack.start("run")
    stack.wait(lambda now: now.trained > summary["trained"], "more steps")
    assert read_end(stack.run_dir) is None
    assert f"run {stack.run}: running" in said(stack, 0, "status", str(stack.run_dir))
    again.popen.send_signal(signal.SIGINT)
    assert again.wait() == 130, again.tail()
    assert f"run {stack.run}: interrupted" in said(stack, 0, "status", str(stack.run_dir))
    assert "Interrupted: " in shown(stack, "Interrupted: ")


def test_a_role_that_refuses_to_start_is_the_cause_after_its_broker_has_ended(
    make_stack: MakeStack, model_dir: Path
) -> None:
    """The checks before the start pass: what is wrong shows when the model is built."""
    stack = make_stack(text_rows(8), "exact_answer", embedded=True)
    broken = stack.directory / "model"
    shutil.copytree(model_dir, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    stack.configure(model={"path": str(broken)})
    command = stack.start("run")
    command.expendable = True
    assert command.wait() == 5, command.tail()
    wait_gone(stack.mark)
    end = read_end(stack.run_dir)
    assert end is not None
    assert (end.state, end.exit_code, end.kind) == ("failed", 5, "ModelError")
    assert end.process in ("worker-0", "trainer", "scorer-0")
    text = said(stack, 1, "status", str(stack.run_dir), "--why")
    assert "the run's broker has ended" in text
    assert f"{end.process} stopped: " in text
    assert "do: see logs/" in text
    assert "fix model.path as the message says, then run the same command again" in text
    assert f"Failed: {end.process} stopped: " in shown(stack, "Failed: ")
