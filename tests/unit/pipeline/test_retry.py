"""How long a command waits for a broker that doesn't answer."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import Connection

from sluice.pipeline.broker import retry
from sluice.pipeline.broker.retry import PatientPool, UntilRetry

_LARGE = st.sampled_from([b"x" * 70_000, "é" * 70_000])
_VALUES = st.binary() | st.text() | st.integers() | st.floats() | st.binary().map(memoryview) | _LARGE


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


def test_an_outage_ends_with_its_error_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, now_s = 0, 0.0
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def command() -> None:
        nonlocal calls, now_s
        calls, now_s = calls + 1, now_s + 7.0
        raise redis.ConnectionError("Connection refused")

    with pytest.raises(redis.ConnectionError, match="refused"):
        asyncio.run(UntilRetry(30).call_with_retry(command, _nothing))
    assert calls == 5


def test_without_a_limit_the_first_failure_is_the_last() -> None:
    calls = 0

    async def command() -> None:
        nonlocal calls
        calls += 1
        raise redis.ConnectionError("Connection refused")

    with pytest.raises(redis.ConnectionError):
        asyncio.run(UntilRetry(0).call_with_retry(command, _nothing))
    assert calls == 1


@given(st.sampled_from(["EVALSHA", "CLIENT SETINFO", b"SET", b"CONFIG GET"]), st.lists(_VALUES))
def test_a_command_is_packed_as_redis_py_packs_it(name: str | bytes, values: list[bytes | str | int | float]) -> None:
    ours = PatientPool().make_connection()
    assert b"".join(ours.pack_command(name, *values)) == b"".join(Connection().pack_command(name, *values))


@pytest.mark.parametrize("value", [None, True, [1]])
def test_a_value_that_no_command_can_have_is_named(value: object) -> None:
    with pytest.raises(redis.DataError, match=type(value).__name__):
        PatientPool().make_connection().pack_command("SET", "key", value)
