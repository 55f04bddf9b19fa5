"""The broker of our own: password, joining, data that survive, and an end with its parent."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from pipeline import broker
from pipeline.config.types import BrokerConfig
from pipeline.embedded import embedded_broker
from pipeline.errors import BrokerError

HOLD = """
import sys
from pipeline.config.types import BrokerConfig
from pipeline.embedded import embedded_broker
with embedded_broker(BrokerConfig(embedded_dir=sys.argv[1])) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def connected(url: str) -> Any:
    return redis.Redis.from_url(url, socket_timeout=2)


def wait_for(holds: Any, cause: str, deadline_s: float = 20) -> None:
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until, f"waited for {cause}"
        time.sleep(0.02)


def is_down(url: str) -> bool:
    try:
        connected(url).ping()
    except redis.RedisError:
        return True
    return False


def test_data_survive_a_restart_and_the_files_are_private(tmp_path: Path) -> None:
    config = BrokerConfig(embedded_dir=str(tmp_path))
    with embedded_broker(config) as url:
        connected(url).set("kept", "1")
        assert broker.broker_url(config) == url
        for name in ("broker.json", "broker.conf"):
            assert (tmp_path / name).stat().st_mode & 0o077 == 0
    assert is_down(url)
    with pytest.raises(BrokerError, match="no broker"):
        broker.broker_url(config)
    with embedded_broker(config) as again:
        assert connected(again).get("kept") == b"1"


def test_a_password_is_needed(broker_config: BrokerConfig) -> None:
    assert broker_config.url
    open_url = "redis://" + broker_config.url.rpartition("@")[2]
    with pytest.raises(BrokerError, match="wrong password"):
        broker.ping(BrokerConfig(url=open_url))
    assert broker.ping(broker_config)["aof_enabled"] == 1


def test_a_second_process_joins_and_leaves_the_broker_running(tmp_path: Path) -> None:
    with embedded_broker(BrokerConfig(embedded_dir=str(tmp_path))) as url:
        with holder(tmp_path) as second:
            assert url_of(second) == url
            second.communicate("", timeout=20)
        assert connected(url).ping()


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with holder(tmp_path) as parent:
        url = url_of(parent)
        connected(url).set("kept", "1")
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: is_down(url), "the orphaned broker to end")
    with embedded_broker(BrokerConfig(embedded_dir=str(tmp_path))) as again:
        assert connected(again).get("kept") == b"1"


def test_the_card_of_a_killed_broker_is_not_joined(tmp_path: Path, broker_config: BrokerConfig) -> None:
    card = tmp_path / "broker.json"
    card.write_text(json.dumps({"url": "redis://:old@127.0.0.1:1/0", "pid": 1}))
    joined: list[str] = []

    def join() -> None:
        with embedded_broker(BrokerConfig(embedded_dir=str(tmp_path))) as url:
            joined.append(url)

    with (tmp_path / "lock").open("w") as lock:  # its successor, which is still starting
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=join)
        thread.start()
        thread.join(0.3)
        assert not joined
        card.write_text(json.dumps({"url": broker_config.url, "pid": os.getpid()}))
        thread.join(20)
    assert joined == [broker_config.url]


def test_a_broker_that_cannot_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "bin" / "redis-server"
    server.parent.mkdir()
    server.write_text("#!/bin/sh\necho the disk is full\nexit 3\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{server.parent}:{os.environ['PATH']}")
    with (
        pytest.raises(BrokerError, match="the disk is full"),
        embedded_broker(BrokerConfig(embedded_dir=str(tmp_path / "data"))),
    ):
        pass


async def test_a_restarted_broker_forgets_scripts_and_they_are_loaded_again(client: Any) -> None:
    scripts = broker.Scripts(client)
    assert await scripts.run("own", ["t-forget:owner"], ["me", 1000]) == 1
    await client.script_flush()
    assert await scripts.run("own", ["t-forget:owner"], ["other", 1000]) == 0
    await asyncio.gather(*(scripts.run("disown", ["t-forget:owner"], ["me"]) for _ in range(2)))
