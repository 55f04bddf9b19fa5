"""The embedded broker ends with its parent, however that ends; its data stay."""

from __future__ import annotations

import json
import time
from typing import Any

import redis

from tests.deadlines import RUN_S
from tests.e2e.fixtures import MakeStack
from tests.e2e.processes import Process, wait_gone
from tests.e2e.stack import Stack


def start_broker(stack: Stack) -> tuple[Process, redis.Redis]:
    """`sluice broker`, and a connection to it."""
    process = stack.start("broker")
    until = time.monotonic() + RUN_S
    while "broker ready" not in process.text():
        assert time.monotonic() < until, process.tail()
        time.sleep(0.02)
    card = json.loads((stack.directory / "broker/broker.json").read_text())
    return process, redis.Redis.from_url(card["url"])


def test_it_ends_with_a_killed_parent_and_its_data_survive(make_stack: MakeStack) -> None:
    stack = make_stack([], embedded=True)
    first, client = start_broker(stack)
    with client:
        raw: Any = client
        raw.set("kept", "1")
        assert raw.config_get("appendonly") == {b"appendonly": b"yes"} or raw.info()["aof_enabled"] == 1
    first.kill()
    wait_gone(stack.mark)
    second, client = start_broker(stack)
    with client:
        assert client.get("kept") == b"1"
    assert second.terminate() == 0, second.tail()
    wait_gone(stack.mark)


def test_a_second_start_joins_the_running_one(make_stack: MakeStack) -> None:
    stack = make_stack([], embedded=True)
    first, client = start_broker(stack)
    second, other = start_broker(stack)
    with client, other:
        client.set("shared", "1")
        assert other.get("shared") == b"1"
        assert second.terminate() == 0
        assert client.ping()
    assert first.terminate() == 0
