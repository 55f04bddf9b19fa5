"""What all rollouts of a server share; it ends with the server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import aiohttp
from yarl import URL

from pipeline.config.types import Config, RolloutServerConfig
from pipeline.http.addresses import AllowedHosts
from producers.http.client import guarded_session
from producers.rollout.counters import Counters
from producers.rollout.line import Line
from producers.rollout.tokenizers import Tokenizers
from producers.rollout.tools import ToolBox, load_tools
from producers.rollout.trainer_client import Retries

_LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class AppState:
    """One pooled HTTP session, one cache of tokenizers, one line."""

    settings: RolloutServerConfig
    hosts: AllowedHosts
    http: aiohttp.ClientSession
    tokenizers: Tokenizers
    tools: ToolBox
    line: Line
    counters: Counters
    retries: Retries

    @property
    def max_bytes(self) -> int:
        """Of a body, in either direction."""
        return int(self.settings.max_body_mb * 2**20)


def named_hosts(config: Config) -> list[str]:
    """The run's gateways and tool server as entries of a list of hosts: no other port of this host."""
    gateway, rollout = config.gateway, config.rollout
    ports = range(gateway.port, gateway.port + max(1, gateway.count))
    found = [f"{name}:{port}" for name in _LOCAL for port in ports if port]
    for url in (rollout.gateway_url, rollout.tool_server_url):
        if url is not None and (host := URL(url).raw_host):
            found.append(f"[{host}]:{URL(url).port}" if ":" in host else f"{host}:{URL(url).port}")
    return found


@contextlib.asynccontextmanager
async def app_state(config: Config, retries: Retries | None = None) -> AsyncGenerator[AppState]:
    """The state of one server. Raises ConfigError for tools that cannot be had."""
    settings = config.rollout_server
    hosts = AllowedHosts([*settings.hosts, *named_hosts(config)], "rollout_server.hosts")
    line = Line(settings.max_concurrent_rollouts, settings.max_waiting_rollouts)
    tokenizers = Tokenizers.of(config)
    pool = 2 * settings.max_concurrent_rollouts  # those that run, and those that say how they ended
    async with guarded_session(hosts, timeout_s=settings.http_client_timeout_s, pool=pool) as http:
        try:
            yield AppState(
                settings, hosts, http, tokenizers, load_tools(settings), line, Counters(line), retries or Retries()
            )
        finally:
            tokenizers.close()
