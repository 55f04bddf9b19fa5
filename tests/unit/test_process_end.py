"""A process ends with its exit code though a thread of it is inside torch, which aborts while Python is taken down."""

from __future__ import annotations

import subprocess
import sys

from sluice.pipeline.errors import EngineHangs
from tests.deadlines import HANG_S

HANGS = """
import threading, time, torch
from sluice.pipeline.cli import main
from sluice.pipeline.errors import EngineHangs

def spin():
    a = torch.rand(64, 64)
    while True:
        a = torch.tanh(a @ a)

def build(name):
    def command(*words, **options):
        raise EngineHangs("no progress for 3 s")
    return command

torch.set_num_threads(1)
threading.Thread(target=spin, daemon=True).start()
time.sleep(0.2)
main.build = build
main.main(["worker"])
"""

SPEAKS = f"""
import os, time
from datetime import timedelta
from torch.distributed import TCPStore
from sluice.consumers.training.ranks import group

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds={HANG_S}))
os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}}
group._REPEAT_S, group._END_S, group._STORE_S = 0.0, {HANG_S}, {HANG_S}
presence = group._Presence(0, 1)
time.sleep(0.2)
"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)


def test_of_an_engine_that_hangs() -> None:
    found = ended(HANGS)
    assert found.returncode == EngineHangs.exit_code, found.stderr
    assert found.stderr.endswith("error: no progress for 3 s\n")


def test_of_a_rank_that_says_what_it_does() -> None:
    found = ended(SPEAKS)
    assert found.returncode == 0, found.stderr
