"""How long a command waits for a broker that doesn't answer."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis

from sluice.pipeline.broker.retry import UntilRetry


async def _nothing(_error: redis.RedisError) -> None:
    pass


def test_a_pause_of_the_process_is_no_outage() -> None:
    """A container was frozen, a laptop slept: the clock went on, and the command under way has timed out."""
    calls = 0

    async def command() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(0.5)  # noqa: ASYNC251 - the whole process stands still
            raise redis.TimeoutError("Timeout reading from 10.0.0.1:6379")
        return "answer"

    assert asyncio.run(UntilRetry(0.3).call_with_retry(command, _nothing)) == "answer"
    assert calls == 2


def test_an_outage_ends_with_its_error_at_the_limit() -> None:
    calls = 0

    async def command() -> None:
        nonlocal calls
        calls += 1
        raise redis.ConnectionError("Connection refused")

    began = time.monotonic()
    with pytest.raises(redis.ConnectionError, match="refused"):
        asyncio.run(UntilRetry(0.3).call_with_retry(command, _nothing))
    assert time.monotonic() - began >= 0.3
    assert calls > 2


def test_without_a_limit_the_first_failure_is_the_last() -> None:
    calls = 0

    async def command() -> None:
        nonlocal calls
        calls += 1
        raise redis.ConnectionError("Connection refused")

    with pytest.raises(redis.ConnectionError):
        asyncio.run(UntilRetry(0).call_with_retry(command, _nothing))
    assert calls == 1
