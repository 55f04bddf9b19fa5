"""`sluice status --why` as a command, the last words of a role, and a broker that does not answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.errors import BrokerError, EngineError
from sluice.pipeline.status.heartbeat import Heartbeat
from sluice.pipeline.status.inspection import look_twice
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.waits import WaitKind
from sluice.producers.submit import produce
from tests.command import call
from tests.deadlines import HANG_S
from tests.integration.stalls.looking import config_of
from tests.killable_broker import KillableBroker
from tests.roles import role_of, run_config


def options(config: Config) -> list[str]:
    return ["--set", f"run={config.run}", "--set", f"broker.url={config.broker.url}", "--set", "broker.retry_for_s=7"]


async def status(config: Config, *more: str) -> int:
    return await asyncio.to_thread(call, "status", *options(config), *more)


async def test_exit_codes_and_words(
    broker_config: BrokerConfig, client: Any, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(broker_config, keys, tmp_path, 2)
    await produce(config)
    assert await status(config, "--why") == 1
    said = capsys.readouterr().out
    assert said.startswith(f"run {keys.run}: not running\n  it is stuck: 1 cause, below")
    assert "1. no process is alive, 2 sequences are in flight" in said
    assert "do:     start `sluice run`" in said
    assert await status(config, "--why", "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema_version"], shown["verdict"]["state"]) == (3, "stalled")
    assert [stall["kind"] for stall in shown["stalls"]] == ["no_process"]
    assert shown["broker"]["used_bytes"] > 0
    assert await status(config) == 0  # without --why it only shows
    assert "! no process is alive" in capsys.readouterr().out
    await client.hincrby(keys.counts, "trained", 2)
    assert await status(config, "--why") == 0
    assert "the run is complete" in capsys.readouterr().out


async def test_a_broker_that_is_away_or_hangs_is_said_in_time(
    keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = KillableBroker(tmp_path)
    config = run_config(BrokerConfig(url=server.url, retry_for_s=3600), keys, tmp_path)
    assert await status(config, "--why") == BrokerError.exit_code
    said = capsys.readouterr().err
    for words in ("does not answer", "start it, or set REDIS_URL", "waits up to 7 s (broker.retry_for_s)"):
        assert words in said
    server.start()
    try:
        async with role_of(config, "worker", "w"):
            pass
        server.signal(signal.SIGSTOP)
        with pytest.raises(BrokerError, match="does not answer"):  # and not after the hour of broker.retry_for_s
            await asyncio.to_thread(look_twice, config)
    finally:
        server.signal(signal.SIGCONT)
        server.kill()


async def test_a_role_that_fails_leaves_its_last_words_and_its_successor_takes_them_away(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    config = run_config(broker_config, keys, run_dir)
    with pytest.raises(ExceptionGroup):  # noqa: PT012 - the scope raises, not one line of it
        async with role_of(config, "worker", "w-1") as role:
            role.status.waiting(WaitKind.ENGINE, "m")
            raise EngineError("the engine broke: x" + "y" * 5000)
    [row] = (await snapshot(client, keys)).processes
    assert (row.error_kind, row.waiting_for, row.is_alive) == ("EngineError", None, False)
    assert (row.error or "").startswith("the engine broke: xyyy")
    assert len(row.error or "") <= 600
    assert row.ended_at is not None
    assert abs(row.ended_at - time.time()) < HANG_S
    assert (await snapshot(client, keys)).alive("worker") == []
    async with role_of(config, "worker", "w-1") as role:
        await role.status.beat()
        [row] = (await snapshot(client, keys)).processes
        assert (row.error, row.ended_at, row.is_alive) == (None, None, True)


async def test_last_words_never_hide_the_error_nor_wait_for_a_broker_that_is_gone(keys: Keys, tmp_path: Path) -> None:
    server = KillableBroker(tmp_path)
    server.start()
    config = run_config(BrokerConfig(url=server.url, retry_for_s=3600), keys, tmp_path)
    # Not after the hour of broker.retry_for_s: this test has less time.
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the scope raises, not one line of it
        async with role_of(config, "worker", "w-1"):
            server.kill()
            raise EngineError("the engine broke")
    assert [type(error) for error in caught.value.exceptions] == [EngineError]


def test_rows_of_older_releases_are_read() -> None:
    row = {"role": "worker", "name": "w", "pid": os.getpid(), "host": "h", "started": 1.0}
    assert msgspec.convert(row, Heartbeat).ended_at is None
