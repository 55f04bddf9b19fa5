"""Connections to Redis: every one has timeouts, a health check and retry with backoff.

Retried calls may run twice, so every script answers a repeat with the same effect (dup, duplicate, ok).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.retry import Retry

from pipeline import lua
from pipeline.config.load import hide_password
from pipeline.config.types import BrokerConfig
from pipeline.errors import BrokerError

_BACKOFF_CAP_S = 1.0
_TRANSIENT: list[type[Exception]] = [redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError, OSError]


class UntilRetry(AsyncRetry):
    """Retries until a deadline; nested uses (command, connect) share it, as the outer one has the earlier start.

    Leans on `_backoff` and `_supported_errors` of redis-py 5.3; tests/integration/test_outage.py fails if they move.
    """

    def __init__(self, for_s: float) -> None:
        super().__init__(ExponentialBackoff(cap=_BACKOFF_CAP_S, base=0.02), 0)  # type: ignore[no-untyped-call]
        self._for_s = for_s

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], fail: Callable[[redis.RedisError], Any]) -> Any:
        """The answer of `do`, or its last transient error once the time is up."""
        until = time.monotonic() + self._for_s
        failures = 0
        while True:
            try:
                return await do()
            except self._supported_errors as error:
                failures += 1
                await fail(cast(Any, error))
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(self._backoff.compute(failures))  # type: ignore[no-untyped-call]


def broker_url(config: BrokerConfig) -> str:
    """The configured URL, or that of the embedded broker which runs in `embedded_dir`; raises BrokerError."""
    if config.url:
        return config.url
    card = Path(config.embedded_dir) / "broker.json"
    try:
        return str(json.loads(card.read_text())["url"])
    except (OSError, ValueError, KeyError) as error:
        raise BrokerError(
            f"no broker: REDIS_URL and broker.url are not set and {card} names no running embedded broker; "
            "start one with `sluice broker` or `sluice up`, or set REDIS_URL=redis://host:6379/0"
        ) from error


def connect(config: BrokerConfig) -> Redis:
    """An asyncio client that outlasts an outage of `retry_for_s`; nothing is sent yet. See `ping`."""
    return cast(
        Redis,
        Redis.from_url(  # type: ignore[no-untyped-call]
            broker_url(config), retry=UntilRetry(config.retry_for_s), retry_on_error=_TRANSIENT, **_timeouts(config)
        ),
    )


def connect_sync(config: BrokerConfig) -> redis.Redis:
    """A blocking client for threads and short commands; it gives up at the first failure."""
    return redis.Redis.from_url(  # type: ignore[no-untyped-call]
        broker_url(config), retry=Retry(NoBackoff(), 0), **_timeouts(config)
    )


def ping(config: BrokerConfig) -> dict[str, Any]:
    """Facts of the server; raises BrokerError that says what is wrong and what to do."""
    url = hide_password(broker_url(config))
    try:
        with connect_sync(config) as client:
            facts = cast("dict[str, Any]", cast(Any, client).info())
    except AuthenticationError as error:
        raise BrokerError(f"{url}: wrong password or user ({error}); put it into REDIS_URL") from error
    except (RedisError, OSError, ValueError) as error:
        raise BrokerError(
            f"{url}: the broker does not answer ({error}); start it, or set REDIS_URL to one that runs"
        ) from error
    version = str(facts.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
        raise BrokerError(f"{url}: Redis {version} is too old; Sluice needs Redis >= 6.2 or Valkey")
    return facts


class Scripts:
    """Our Lua scripts over one connection; loaded once, reloaded when a restarted server forgot them."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._loaded: dict[str, Any] = {}

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run `lua/{name}.lua`; raises BrokerError when the server refuses it."""
        script = self._loaded.get(name)
        if script is None:
            script = self._loaded[name] = self._client.register_script(lua.source(name))
        try:
            return await cast("Awaitable[Any]", script(keys=list(keys), args=list(args)))
        except ResponseError as error:
            raise BrokerError(f"script {name} was refused: {error}") from error


def _timeouts(config: BrokerConfig) -> dict[str, Any]:
    return {
        "socket_timeout": config.socket_timeout_s,
        "socket_connect_timeout": config.connect_timeout_s,
        "health_check_interval": 15,
        "socket_keepalive": True,
    }
