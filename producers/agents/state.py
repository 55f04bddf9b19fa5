"""Shared by all rollouts of a server: connections, tokenizers, tools, the queue, metrics. Ends with the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import aiohttp
from yarl import URL

from sluice.pipeline.config.types import Config, RolloutServerConfig
from sluice.pipeline.http.addresses import AllowedHosts
from sluice.pipeline.telemetry.exporter import Telemetry
from sluice.pipeline.telemetry.families import counter, gauge, histogram, page
from sluice.producers.agents.environment import Environments, environments
from sluice.producers.agents.tokenizers import Tokenizers
from sluice.producers.agents.tools import ToolBox, load_tools
from sluice.producers.agents.trainer_client import Retries
from sluice.producers.http.client import guarded_session
from sluice.producers.http.schemas import RolloutResponse

_LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class AppState:
    """One pooled HTTP session, one cache of tokenizers, one line."""

    settings: RolloutServerConfig
    hosts: AllowedHosts
    http: aiohttp.ClientSession
    tokenizers: Tokenizers
    tools: ToolBox
    environments: Environments | None
    line: Line
    counters: Counters
    retries: Retries

    @property
    def max_bytes(self) -> int:
        """Limit of a body, in either direction."""
        return int(self.settings.max_body_mb * 2**20)


def named_hosts(config: Config) -> list[str]:
    """The run's gateways and tool server as host list entries with ports: no other port of this host is allowed."""
    gateway, rollout = config.gateway, config.rollout
    ports = range(gateway.port, gateway.port + max(1, gateway.count))
    found = [f"{name}:{port}" for name in _LOCAL for port in ports if port]
    for url in (rollout.gateway_url, rollout.tool_server_url):
        if url is not None and (host := URL(url).raw_host):
            found.append(f"[{host}]:{URL(url).port}" if ":" in host else f"{host}:{URL(url).port}")
    return found


@contextlib.asynccontextmanager
async def app_state(config: Config, retries: Retries | None = None) -> AsyncGenerator[AppState]:
    """The state of one server. Raises ConfigError for tools that can't be loaded."""
    settings = config.rollout_server
    hosts = AllowedHosts([*settings.hosts, *named_hosts(config)], "rollout_server.hosts")
    line = Line(settings.max_concurrent_rollouts, settings.max_waiting_rollouts)
    tokenizers = Tokenizers.of(config)
    pool = 2 * settings.max_concurrent_rollouts  # running rollouts, plus those reporting their end
    session = guarded_session(hosts, timeout_s=settings.http_client_timeout_s, pool=pool)
    async with session as http, environments(settings) as worlds:
        try:
            yield AppState(
                settings,
                hosts,
                http,
                tokenizers,
                load_tools(settings, config.images, config.gateway.max_body_mb),
                worlds,
                line,
                Counters(line),
                retries or Retries(),
            )
        finally:
            tokenizers.close()


RETRY_AFTER_S = 5


class LineFull(Exception):
    """The queue is full; ask again later."""


class Line:
    """The queue of rollouts: `join` takes a place, `leave` gives it back."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.in_hand, self.running = 0, 0
        self._turns = asyncio.Semaphore(max_running)

    @property
    def waiting(self) -> int:
        """Rollouts that haven't started."""
        return self.in_hand - self.running

    def join(self) -> None:
        """Take a place. Raises LineFull."""
        if self.in_hand >= self.max_running + self.max_waiting:
            raise LineFull
        self.in_hand += 1

    def leave(self) -> None:
        """Give the place back."""
        self.in_hand -= 1

    async def start(self) -> None:
        """Wait for a free slot; pair with `end`."""
        await self._turns.acquire()
        self.running += 1

    def end(self) -> None:
        """Free the slot for the next one."""
        self.running -= 1
        self._turns.release()


class Counters:
    """Counts of finished and running work; on the server's `/metrics` and at its `metrics` address."""

    def __init__(self, line: Line) -> None:
        self.telemetry = Telemetry("rollout-server")
        to = self.telemetry.registry
        self._rollouts = counter("sluice_rollouts_total", to)
        self._duration = histogram("sluice_rollout_seconds", to)
        self.llm_s = histogram("sluice_rollout_llm_seconds", to)
        self.tool_s = histogram("sluice_rollout_tool_seconds", to)
        self.tool_calls = counter("sluice_rollout_tool_calls_total", to)
        self.retries = counter("sluice_rollout_retries_total", to)
        self.resyncs = counter("sluice_rollout_resyncs_total", to)
        self.drifts = counter("sluice_rollout_drifts_total", to)
        self.finishes = counter("sluice_rollout_finishes_total", to)
        self.callbacks = counter("sluice_rollout_callbacks_total", to)
        self.refused = counter("sluice_rollout_refused_total", to)
        gauge("sluice_rollouts_running", to).set_function(lambda: line.running)
        gauge("sluice_rollouts_waiting", to).set_function(lambda: line.waiting)

    def ended(self, answer: RolloutResponse) -> None:
        """Count one answered rollout."""
        category = answer.extra_fields.get("error_category", "")
        self._rollouts.labels(answer.status.value, answer.finish_reason or "", category).inc()
        self._duration.labels(answer.status.value).observe(answer.metrics.total_latency_ms / 1000)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return page(self.telemetry.registry)
