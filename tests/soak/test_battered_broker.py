"""The broker of a soak is killed whenever its plan says so, however its starts and its deaths overlap."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from tests.soak.battered_broker import BatteredBroker


def test_starts_that_overlap_leave_one_server_and_a_kill_ends_it(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    broker = BatteredBroker(tmp_path / "broker")
    try:
        with ThreadPoolExecutor(2) as healers:
            list(healers.map(lambda _: broker.start(), range(2)))
    finally:
        broker.kill()
    with redis.Redis.from_url(broker.url) as client, pytest.raises(redis.ConnectionError):
        client.ping()
