"""The broker of a soak is killed whenever its plan says so, however its starts and its deaths overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.soak.battered_broker import BatteredBroker


def test_a_second_start_doesnt_hide_the_server_from_a_kill(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    broker = BatteredBroker(tmp_path / "broker")
    try:
        broker.start()
        broker.start()
    finally:
        broker.kill()
    with redis.Redis.from_url(broker.url) as client, pytest.raises(redis.ConnectionError):
        client.ping()
