"""A run has a dashboard on a port of its own, which may die and comes back, and ends with the run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.processes import Process, wait_gone


def poll(holds: Callable[[], Any], cause: str, command: Process) -> Any:
    """What it returns once that is true."""
    until = time.monotonic() + RUN_S
    while True:
        try:
            if found := holds():
                return found
        except OSError:  # not there yet
            pass
        assert time.monotonic() < until, f"waited {RUN_S:.0f} s for {cause}\n{command.tail()}"
        time.sleep(0.1)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_a_run_has_a_dashboard_that_comes_back_and_leaves_with_it(make_stack: MakeStack) -> None:
    stack = make_stack(text_rows(8), "exact_answer", data={"epochs": 100_000})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stack.configure(dashboard={"enabled": True, "port": taken.getsockname()[1]})
        command = stack.start("up")
        url = poll(lambda: re.search(r"dashboard (http://\S+)", command.text()), "its address", command)[1]
    assert not url.endswith(f":{stack.config.dashboard.port}"), "that port is taken"
    poll(lambda: "producer-0" in get(url + "/workers") or "trainer" in get(url + "/workers"), "the processes", command)
    poll(lambda: re.search(r"<dt>Trained</dt><dd>[1-9]", get(url + "/")), "the first trained sequences", command)
    poll(lambda: json.loads(get(url + "/health"))["status"] == "healthy", "it to be healthy", command)
    # Its first heartbeats come before it listens.
    [row] = poll(lambda: [one for one in stack.snapshot().alive("dashboard") if "url" in one.facts], "its url", command)
    assert row.facts["url"] == url
    os.kill(row.pid, signal.SIGKILL)
    poll(lambda: [one for one in stack.snapshot().alive("dashboard") if one.pid != row.pid], "another one", command)
    poll(lambda: stack.config.run in get(url + "/"), "the same address", command)
    assert command.popen.poll() is None, "the run goes on"
    command.popen.send_signal(signal.SIGINT)
    assert command.wait() == 130, command.tail()
    wait_gone(stack.mark)
