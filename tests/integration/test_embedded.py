"""The broker of our own: password, joining, data that survive, and an end with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from sluice.pipeline.broker import connection, embedded
from sluice.pipeline.broker.embedded import embedded_broker, find_server
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, Own, RoleKey
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import BrokerError
from tests.deadlines import HANG_S

HOLD = """
import sys
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.broker.embedded import embedded_broker
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
    return redis.Redis.from_url(url, socket_timeout=60)


def card(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "broker.json").read_text())


def is_on_its_card(directory: Path, pid: int | None) -> bool:
    """The card is written once the process has begun, and there may be none before."""
    with contextlib.suppress(FileNotFoundError):
        return card(directory)["pid"] == pid
    return False


def wait_for(holds: Any, cause: str, deadline_s: float = HANG_S) -> None:
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


def answering(url: str) -> int | None:
    """The process that answers at `url`."""
    try:
        return connected(url).info("server")["process_id"]
    except redis.RedisError:
        return None


def test_data_survive_a_restart_and_the_files_are_private(tmp_path: Path) -> None:
    config = BrokerConfig(embedded_dir=str(tmp_path))
    with embedded_broker(config) as url:
        connected(url).set("kept", "1")
        assert connection.broker_url(config) == url
        for name in ("broker.json", "broker.conf"):
            assert (tmp_path / name).stat().st_mode & 0o077 == 0
    assert is_down(url)
    with pytest.raises(BrokerError, match="no broker"):
        connection.broker_url(config)
    with embedded_broker(config) as again:
        assert connected(again).get("kept") == b"1"


def test_a_password_is_needed(broker_config: BrokerConfig) -> None:
    assert broker_config.url
    open_url = "redis://" + broker_config.url.rpartition("@")[2]
    with pytest.raises(BrokerError, match="wrong password"):
        connection.ping(BrokerConfig(url=open_url))
    assert connection.ping(broker_config)["aof_enabled"] == 1


def test_a_second_process_joins_and_leaves_the_broker_running(tmp_path: Path) -> None:
    with embedded_broker(BrokerConfig(embedded_dir=str(tmp_path))) as url:
        with holder(tmp_path) as second:
            assert url_of(second) == url
            second.communicate("", timeout=HANG_S)
        assert connected(url).ping()


def test_a_start_is_not_ready_because_another_server_answers_at_its_address(tmp_path: Path) -> None:
    """A killed predecessor does so for a moment, and is gone when the caller sends its first command."""
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    with embedded_broker(BrokerConfig(embedded_dir=str(first))) as url:
        server = embedded.EmbeddedServer([find_server(), str(first / "broker.conf")], url, second)
        with pytest.raises(BrokerError, match="did not start"):
            server.start()
        assert answering(url) == card(first)["pid"]


@pytest.mark.parametrize("end", [signal.SIGKILL, None], ids=["killed", "ended"])
def test_who_joined_starts_the_broker_again_when_its_owner_ends(tmp_path: Path, end: signal.Signals | None) -> None:
    with holder(tmp_path) as first:
        url = url_of(first)
        connected(url).set("kept", "1")
        with holder(tmp_path) as second:
            assert url_of(second) == url
            owned = card(tmp_path)["pid"]
            if end is None:
                first.communicate("", timeout=HANG_S)
            else:
                first.send_signal(end)
                first.wait(HANG_S)
            wait_for(lambda: answering(url) not in (owned, None), "the heir's broker")
            wait_for(lambda: is_on_its_card(tmp_path, answering(url)), "its card")
            assert connected(url).get("kept") == b"1"
            with holder(tmp_path) as third:
                assert url_of(third) == url
                third.communicate("", timeout=HANG_S)
            second.communicate("", timeout=HANG_S)
    assert is_down(url)
    assert not (tmp_path / "broker.json").exists()


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
        thread.join(HANG_S)
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


def test_a_broker_that_dies_comes_back_where_it_was_with_its_data(tmp_path: Path) -> None:
    with embedded_broker(BrokerConfig(embedded_dir=str(tmp_path))) as url:
        connected(url).set("kept", "1")
        for _ in range(2):
            pid = card(tmp_path)["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: card(tmp_path)["pid"] != pid, "another process on the card")
            wait_for(lambda: not is_down(url), "the broker to be back")
            assert card(tmp_path)["url"] == url
            assert connected(url).get("kept") == b"1"
        last = card(tmp_path)["pid"]
    assert is_down(url)
    assert not (tmp_path / "broker.json").exists()
    wait_for(lambda: not Path(f"/proc/{last}").exists(), "the last process to end")


def test_a_stop_while_it_comes_back_ends_it(tmp_path: Path) -> None:
    for _ in range(5):
        with embedded_broker(BrokerConfig(embedded_dir=str(tmp_path))) as url:
            os.kill(card(tmp_path)["pid"], signal.SIGKILL)
            time.sleep(random.random() * 0.2)
        assert is_down(url)
        assert not (tmp_path / "broker.json").exists()


ENTRIES = 48_000


def slow_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BrokerConfig:
    """A broker with data that the real server loads for a quarter of a minute; it answers once in 1024 entries."""
    config = BrokerConfig(embedded_dir=str(tmp_path / "data"))
    with embedded_broker(config) as url:
        pipe = connected(url).pipeline(transaction=False)
        for at in range(ENTRIES):
            pipe.set(f"key-{at}", "1")
        pipe.execute()
    server = tmp_path / "bin" / "redis-server"
    server.parent.mkdir()
    server.write_text(f'#!/bin/sh\nexec {find_server()} "$@" --key-load-delay 300\n')
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{server.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(embedded, "START_S", HANG_S)
    return config


def test_data_that_take_long_to_load_do_not_fail_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of who starts the server and of who joins it: the deadline of a start is over while they see it load."""
    config = slow_to_load(tmp_path, monkeypatch)
    joined: list[str] = []
    in_time, late, probe = set[int](), set[int](), embedded._probe  # who saw it load

    def looking(client: Any, pid: int | None = None) -> Any:
        if (state := probe(client, pid)) == "loading":
            (in_time if embedded.START_S else late).add(threading.get_ident())
            if len(in_time) == 2:
                monkeypatch.setattr(embedded, "START_S", 0.0)
            if len(late) == 2:
                client.config_set("key-load-delay", 0)
        return state

    monkeypatch.setattr(embedded, "_probe", looking)

    def join() -> None:
        wait_for((tmp_path / "data" / "broker.json").exists, "the first process to start its broker")
        with embedded_broker(config) as url:
            joined.append(url)

    second = threading.Thread(target=join)
    second.start()
    with embedded_broker(config) as url:
        assert connected(url).dbsize() == ENTRIES
        second.join(HANG_S)
        assert joined == [url]
    assert len(late) == 2, "it was loaded before the shorter deadline: this shows nothing"


def test_data_that_take_too_long_to_load_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = slow_to_load(tmp_path, monkeypatch)
    monkeypatch.setattr(embedded, "LOAD_S", 0.1)
    with pytest.raises(BrokerError, match="still loading its data after"), embedded_broker(config):
        pass
    assert not (tmp_path / "data" / "broker.json").exists()


async def test_a_restarted_broker_forgets_scripts_and_they_are_loaded_again(client: Any) -> None:
    scripts = Scripts(client)
    assert await scripts.ask(RoleKey(owner="t-forget:owner"), Own(nonce="me", ttl_ms=60_000, renew=False)) == 1
    await client.script_flush()
    assert await scripts.ask(RoleKey(owner="t-forget:owner"), Own(nonce="other", ttl_ms=60_000, renew=False)) == 0
    await asyncio.gather(*(scripts.ask(RoleKey(owner="t-forget:owner"), Disown(nonce="me")) for _ in range(2)))


def test_its_files_are_their_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "broker"
    directory.mkdir()
    left = directory / "broker.log"
    left.touch(0o644)
    with embedded_broker(BrokerConfig(embedded_dir=str(directory))) as url, connected(url) as client:
        client.set("a", 1)
        files = list(directory.rglob("*"))
        assert {"broker.json", "broker.conf", "broker.log", "lock"} <= {path.name for path in files}
        assert any("aof" in path.name for path in files)
        for path in (directory, *files):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
