"""A rollout server whose names' addresses a test decides."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp

from sluice.pipeline.config.types import Config, RolloutServerConfig
from sluice.producers.agents.runs import open_runs
from sluice.producers.agents.server import build_app
from sluice.producers.agents.state import app_state
from sluice.producers.http.client import guarded_session
from tests.deadlines import HANG_S
from tests.integration.http.names import Names
from tests.integration.rollout.conftest import QUICK
from tests.served import Served, served


@contextlib.asynccontextmanager
async def served_with(
    names: Names, tokenizers: dict[str, str], *hosts: str
) -> AsyncIterator[tuple[Served, aiohttp.ClientSession]]:
    """The server, and the session that it asks with."""
    settings = RolloutServerConfig(tokenizers=tokenizers, tool_latency_ms=(0, 0), deadline_s=HANG_S, hosts=hosts)
    async with (
        app_state(Config(rollout_server=settings), QUICK) as state,
        guarded_session(state.hosts, timeout_s=HANG_S, resolver=names) as http,
    ):
        state = replace(state, http=http)
        async with open_runs(state) as runs, served(build_app(state, runs)) as server:
            yield server, http
