"""A process knows what it holds."""

from __future__ import annotations

import sys

import pytest

from sluice.workers.decode_worker import resident_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_what_is_allocated_is_counted() -> None:
    before = resident_bytes()
    held = bytearray(b"x" * (64 << 20))
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert 60 << 20 < after - before < 200 << 20
    assert len(held) == 64 << 20
