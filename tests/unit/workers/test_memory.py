"""A process knows what it holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.deadlines import HANG_S

# A process of its own: one that has run tests may hold freed memory, and hands that out first.
SCRIPT = """
from sluice.pipeline.status.heartbeat import resident_bytes
before = resident_bytes()
held = bytearray(b"x" * (64 << 20))
print(resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_what_is_allocated_is_counted() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert 60 << 20 < int(done.stdout) < 200 << 20
