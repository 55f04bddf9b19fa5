"""What a process notes of its own start."""

from __future__ import annotations

import subprocess
import sys
import time

from sluice.pipeline.run.role import StartTimes
from tests.deadlines import HANG_S


def test_parts_follow_one_another_and_each_counts_once() -> None:
    start, now = StartTimes(), time.time()
    start.ended("import", now)
    start.ended("load", now + 2.5)
    start.ended("import", now + 9)
    start.ended("first_token", now + 2)  # by another clock
    assert start.parts["import"] > 0
    assert (start.parts["load"], start.parts["first_token"]) == (2.5, 0.0)


def test_the_first_part_begins_with_the_process() -> None:
    code = "import time; time.sleep(0.3); from sluice.pipeline.run.role import StartTimes\n"
    code += "start = StartTimes(); start.ended('command'); print(start.parts['command'])"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert 0.3 <= float(done.stdout) <= time.monotonic() - began + 0.05
