"""A real broker whose append-only file finds no room for a while: the kernel's limit on a file's size is its disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from sluice.pipeline.broker import append_only
from sluice.pipeline.broker.append_only import close_gaps, could_not_write
from sluice.pipeline.broker.connection import connect
from sluice.pipeline.broker.embedded import embedded_broker
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.status.heartbeat import BEAT_S, StatusReporter
from sluice.pipeline.wire.keys import Keys
from tests.deadlines import HANG_S
from tests.killable_broker import KillableBroker
from tests.roles import eventually


class Cramped(KillableBroker):
    """Its file may be kept from growing."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, wrap=lambda command: ["sh", "-c", 'trap "" XFSZ; exec "$@"', "sh", *command])
        self.file = directory / "appendonlydir" / "appendonly.aof.2.incr.aof"

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=60)

    def begin(self) -> None:
        """With a file that was written anew since the start, as after some time."""
        self.start()
        with self.client() as client:
            wait(lambda: answers(client), "the broker")
            client.set("first", 1)
            client.bgrewriteaof()
            wait(lambda: self.file.exists() and not info(client)["aof_rewrite_in_progress"], "a new file")

    def limit(self, more: int | None) -> None:
        """So many more bytes; None: any number."""
        assert self._process is not None
        _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        most = hard if more is None else self.file.stat().st_size + more
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (most, hard))

    def fill(self) -> None:
        """It refuses writes after this, having written a part of one."""
        with self.client() as client:
            client.set("before", "x" * 100)
            wait(lambda: has_written(client), "all to be written")
            self.limit(50)
            client.set("cut", "y" * 1000)
            wait(lambda: refuses(client), "a refusal")

    async def is_renewed(self) -> bool:
        """Whether its file was replaced by another."""
        return not self.file.exists()

    def kill_children(self) -> None:
        assert self._process is not None
        for children in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)

    def refusals(self) -> int:
        """Writes that it has refused so far."""
        with self.client() as client:
            return int(cast("dict[str, Any]", client.info("errorstats"))["errorstat_MISCONF"]["count"])


def wait(holds: Callable[[], bool], cause: str) -> None:
    until = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < until, f"waited {HANG_S} s for {cause}"
        time.sleep(0.02)


def info(client: redis.Redis, section: str = "persistence") -> dict[str, Any]:
    return cast("dict[str, Any]", client.info(section))


def has_written(client: redis.Redis) -> bool:
    """What it has acknowledged is in its file; it holds that back for up to 2 s while it syncs the file."""
    return not info(client)["aof_buffer_length"]


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def refuses(client: redis.Redis) -> bool:
    try:
        client.set("refused", 1)
    except redis.ResponseError as error:
        return could_not_write(error)
    return False


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Cramped]:
    broker = Cramped(tmp_path)
    broker.begin()
    yield broker
    broker.kill()
    print(broker.log.read_text())  # shown if a test fails


@contextlib.asynccontextmanager
async def beating(broker: Cramped) -> AsyncIterator[None]:
    """A process that reports its state, and was refused while the disk was full, which it isn't any more."""
    async with connect(BrokerConfig(url=broker.url), "r") as client:
        reporter = StatusReporter(client, Keys("r"), "worker", "w")
        broker.fill()
        before = broker.refusals()
        beats = asyncio.create_task(reporter.run())
        try:

            async def is_refused() -> bool:
                return broker.refusals() > before

            await eventually(is_refused, "a heartbeat to be refused", HANG_S)
            broker.limit(None)
            yield
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)


async def test_a_process_that_gets_through_again_has_the_file_written_anew(broker: Cramped) -> None:
    async with beating(broker):
        await eventually(broker.is_renewed, "another file", HANG_S)
    broker.kill()
    broker.start()
    with broker.client() as client:
        wait(lambda: answers(client), "the broker on its own data")
        assert client.get("cut") == b"y" * 1000


async def test_a_file_that_could_not_be_written_anew_is_asked_for_again(
    broker: Cramped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_only, "AGAIN_S", 0.0)
    with broker.client() as client:
        client.config_set("rdb-key-save-delay", 1_000_000_000)  # µs: a file that is written anew isn't soon ready
        async with beating(broker):

            async def is_being_written() -> bool:
                return bool(info(client)["aof_rewrite_in_progress"])

            await eventually(is_being_written, "the first attempt", HANG_S)
            client.config_set("rdb-key-save-delay", 0)
            broker.kill_children()

            await eventually(broker.is_renewed, "another file", HANG_S)


async def test_a_broker_that_does_not_let_us_is_asked_once(broker: Cramped) -> None:
    with broker.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-bgrewriteaof")
        asked = "cmdstat_bgrewriteaof"

        async def is_refused() -> bool:
            return info(client, "commandstats").get(asked, {}).get("rejected_calls", 0) > 0

        async with beating(broker):
            await eventually(is_refused, "the request", HANG_S)
            await asyncio.sleep(2.5 * BEAT_S)
        assert info(client, "commandstats")[asked]["rejected_calls"] == 1


def test_our_own_broker_starts_on_a_file_with_zeros_between_and_has_all_of_it(broker: Cramped, tmp_path: Path) -> None:
    broker.fill()
    broker.limit(None)
    with broker.client() as client:
        wait(lambda: not refuses(client), "room")
        client.set("after", "z" * 100)
        wait(lambda: has_written(client), "all to be written")
    broker.kill()
    assert bytes(50) in broker.file.read_bytes()
    with embedded_broker(BrokerConfig(embedded_dir=str(tmp_path))) as url, redis.Redis.from_url(url) as client:
        found = client.mget("first", "before", "cut", "refused", "after")
    assert found == [b"1", b"x" * 100, b"y" * 1000, b"1", b"z" * 100]


def test_a_file_that_is_damaged_otherwise_stays_as_it_is(broker: Cramped, tmp_path: Path) -> None:
    with broker.client() as client:
        client.set("a", "x" * 100)
    broker.kill()
    whole = broker.file.read_bytes()
    for damaged in (bytes(9) + b"junk" + whole, whole + b"junk" + bytes(9), whole):
        broker.file.write_bytes(damaged)
        assert close_gaps(tmp_path) == 0
        assert broker.file.read_bytes() == damaged
    broker.file.write_bytes(whole + bytes(9) + whole[:-5])
    assert close_gaps(tmp_path) == 9
    assert broker.file.read_bytes() == whole + whole[:-5]
