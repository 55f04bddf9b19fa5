"""Connections to Redis: every one has timeouts, a health check and retry with backoff.

Retried calls may run twice, so every script answers a repeat with the same effect (dup, duplicate, ok).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import redis
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.connection import parse_url as options_of
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from sluice.pipeline.broker.retry import (
    TRANSIENT,
    Outage,
    PatientClusterPool,
    PatientPool,
    PatientSentinelPool,
    SlotPrimary,
    UntilRetry,
    cause_of,
)
from sluice.pipeline.config.redaction import hide_password
from sluice.pipeline.config.types import BrokerConfig
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.logs import get_logger

_HEALTH_CHECK_S = 15
_ASK_AGAIN_S = 0.5
_SENTINEL_PORT, _NODE_PORT = 26379, 6379
_ESCAPED = "with %2F for / and %23 for #"

T = TypeVar("T")


class BrokerSilent(BrokerError):
    """Nothing answers there now."""


def broker_url(config: BrokerConfig) -> str:
    """The configured URL, or that of the embedded broker running in `embedded_dir`; raises BrokerError."""
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


def check_url(config: BrokerConfig) -> None:
    """Raises BrokerError if there is no URL, or none that can be read; nothing is sent."""
    connection_pool(config)


def _parsed(url: str, parse: Callable[[str], T]) -> T:
    """Raises BrokerError."""
    try:
        return parse(url)
    except ValueError:  # its text shows what is in the port's place, which may be part of a password
        raise _no_url(url) from None


def _no_url(url: str) -> BrokerError:
    return BrokerError(f"{hide_password(url)}: not a broker's URL; write redis://:password@host:6379/0, {_ESCAPED}")


def connect(config: BrokerConfig, run: str = "") -> Redis:
    """An asyncio client that outlasts an outage of `retry_for_s`; nothing is sent yet. See `ping`.

    `run`: the run served over this connection; on a cluster it determines the node.
    """
    return Redis.from_pool(connection_pool(config, run))


def connection_pool(config: BrokerConfig, run: str = "") -> ConnectionPool:
    """What `connect` uses, for clients of another class; the caller disconnects it."""
    patience: dict[str, Any] = {"retry": UntilRetry(config.retry_for_s), "retry_on_error": TRANSIENT}
    # redis-py 8 would refuse a process's 101st connection; nothing here waits for a free one.
    settings: dict[str, Any] = {"max_connections": 1 << 31, **_timeouts(config), **patience}
    if config.sentinel_master is None:
        if not config.cluster:
            settings.update(_parsed(broker_url(config), options_of))
            return PatientPool(**settings)
        primary, server = _slot_primary(config, run)
        kind = SSLConnection if server.pop("ssl", False) else Connection
        return PatientClusterPool(primary, connection_class=kind, **server, **settings)
    sentinels, server = node_addresses(config, _SENTINEL_PORT)
    manager: Any = AsyncSentinel(sentinels, sentinel_kwargs=_sentinel_timeouts(config))
    return PatientSentinelPool(config.sentinel_master, manager, **server, **settings)


def is_cluster(client: Redis) -> bool:
    """Whether this client can't reach keys of other slots."""
    return isinstance(client.connection_pool, PatientClusterPool)


def connect_sync(config: BrokerConfig, run: str = "") -> redis.Redis:
    """A blocking client for threads and short commands; it gives up at the first failure."""
    settings: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), **_timeouts(config)}
    if config.sentinel_master is None:
        if config.cluster:
            primary, server = _slot_primary(config, run)
            return redis.Redis(*primary.find(), **server, **settings)
        made: Callable[[str], redis.Redis] = partial(cast(Any, redis.Redis).from_url, **settings)
        return _parsed(broker_url(config), made)
    sentinels, server = node_addresses(config, _SENTINEL_PORT)
    manager: Any = Sentinel(sentinels, sentinel_kwargs=_sentinel_timeouts(config))
    return cast(redis.Redis, manager.master_for(config.sentinel_master, **server, **settings))


def _slot_primary(config: BrokerConfig, run: str) -> tuple[SlotPrimary, dict[str, Any]]:
    nodes, server = node_addresses(config, _NODE_PORT)
    return SlotPrimary(nodes, run, server, config.connect_timeout_s), server


def node_addresses(config: BrokerConfig, port: int) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Addresses of the Sentinels or cluster nodes in `redis://[user:password@]host:port[,host:port…]/db`, and how to
    connect to the servers. `port`: used where none is given."""
    url = broker_url(config)
    try:
        parts = urlsplit(url)
        entry, at, hosts = parts.netloc.rpartition("@")
        found = [urlsplit(f"//{host}") for host in hosts.split(",")]
        addresses = [(each.hostname or "", each.port or port) for each in found]
        server = dict(options_of(f"{parts.scheme}://{entry}{at}node{parts.path}?{parts.query}"))
    except ValueError:  # as in `_parsed`
        addresses, server = [("", port)], {}
    if not all(host for host, _ in addresses):
        raise BrokerError(
            f"{hide_password(url)}: write {_them(config)} as redis://:password@host:{port},host2:{port}/0, {_ESCAPED}"
        )
    secure = server.pop("connection_class", None) is not None
    server.pop("host", None)
    return addresses, {**server, "ssl": True} if secure else server


def _them(config: BrokerConfig) -> str:
    return "a cluster's nodes" if config.cluster else "Sentinels"


def ping(config: BrokerConfig, run: str = "") -> dict[str, Any]:
    """Facts about the server; raises BrokerError saying what is wrong and what to do."""
    url = hide_password(broker_url(config))
    try:
        with connect_sync(config, run) as client:
            facts = cast("dict[str, Any]", cast(Any, client).info())
    except AuthenticationError as error:
        raise BrokerError(f"{url}: wrong password or user ({error}); correct REDIS_URL") from error
    except ValueError:  # of a host that no name server can be asked for
        raise _no_url(broker_url(config)) from None
    except (RedisError, OSError) as error:
        advice = "start it" if config.url else "if its run has ended, start one with `sluice broker` or `sluice up`"
        raise BrokerSilent(
            f"{url}: the broker does not answer ({cause_of(error)}); {advice}, or set REDIS_URL to a running one"
        ) from error
    version = str(facts.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
        raise BrokerError(f"{url}: Redis {version} is too old; Sluice needs Redis >= 6.2 or Valkey")
    if bool(facts.get("cluster_enabled")) != config.cluster:
        advice = (
            "a single server: unset broker.cluster" if config.cluster else "a Redis Cluster: --set broker.cluster=true"
        )
        raise BrokerError(f"{url}: this is {advice}")
    return facts


def refuse_unsafe(config: BrokerConfig, facts: dict[str, Any]) -> None:
    """Raises BrokerError if the settings that INFO shows (CONFIG may be forbidden) would lose data a run relies on."""
    url, policy = hide_password(broker_url(config)), str(facts.get("maxmemory_policy", ""))
    if policy.startswith("allkeys"):
        raise BrokerError(
            f"{url}: maxmemory-policy is {policy}: a full broker would evict unread data; set it to noeviction (CONFIG "
            "SET maxmemory-policy noeviction, and in its configuration file)"
        )
    if not facts.get("aof_enabled") and not config.allow_volatile:
        raise BrokerError(
            f"{url}: the append-only file is off: a broker restart loses everything in flight; set appendonly to yes "
            "(CONFIG SET appendonly yes, and in its configuration file), or accept the loss: "
            "--set broker.allow_volatile=true"
        )


async def wait_ready(config: BrokerConfig, run: str = "") -> dict[str, Any]:
    """`ping`, but waits for an unreachable broker as long as `connect` would."""
    outage, said = Outage(config.retry_for_s), False
    while True:
        try:
            return await asyncio.to_thread(ping, config, run)
        except BrokerSilent as error:
            if outage.is_too_long():
                raise
            if not said:
                get_logger().warning("waiting for the broker", error=str(error), at_most_s=config.retry_for_s)
            said = True
        await asyncio.sleep(_ASK_AGAIN_S)


def _timeouts(config: BrokerConfig) -> dict[str, Any]:
    return {
        "socket_timeout": config.socket_timeout_s,
        "socket_connect_timeout": config.connect_timeout_s,
        "health_check_interval": _HEALTH_CHECK_S,
        "socket_keepalive": True,
    }


def _sentinel_timeouts(config: BrokerConfig) -> dict[str, Any]:
    return {"socket_timeout": config.connect_timeout_s, "socket_connect_timeout": config.connect_timeout_s}
