"""The composition root of a gateway process.

| waits for       | unblocked by         |
|-----------------|----------------------|
| requests        | a caller             |
| requests to end | workers (draining)   |
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

from pipeline.config.types import Config
from pipeline.http.server import serve
from pipeline.logs import get_logger
from pipeline.run.role import Role, default_name, role_process
from producers.gateway.app import make_app
from producers.gateway.service import Service, make_service
from producers.tokenizer import load_policy_tokenizer

KEY_NAME = "SLUICE_GATEWAY_API_KEY"
_SWEEP_S = 5.0
_REPORT_S = 1.0
_SWEPT_AT_ONCE = 100
_GRACE = 0.8  # of the time that the process has to stop; the rest is for the way out


async def gateway(config: Config, index: int = 0, stop: asyncio.Event | None = None) -> None:
    """Serve until asked to stop, by a signal or by the given event."""
    async with role_process(config, "gateway", default_name("gateway"), stop) as role:
        port = config.gateway.port + index if config.gateway.port else 0
        await run_gateway(role, port, lambda port: get_logger().info("gateway ready", port=port))


async def run_gateway(role: Role, port: int, on_ready: Callable[[int], object] | None = None) -> None:
    """The gateway inside a role."""
    config = role.config
    role.status.waiting(f"the tokenizer of {config.model.path}")
    renderer = await asyncio.to_thread(load_policy_tokenizer, config.model)
    service = make_service(config, role.client, role.keys, renderer, role.telemetry.registry)
    role.spawn(service.replies.run())
    role.spawn(service.decoding.run())
    role.spawn(_sweep(role, service))
    role.spawn(_report(role, service))
    app = make_app(service, os.environ.get(KEY_NAME) or None)
    grace_s = _GRACE * config.up.stop_grace_s
    try:
        await serve(app, host=config.gateway.host, port=port, stop=role.stop, grace_s=grace_s, on_ready=on_ready)
        await service.decoding.settle()
    finally:
        service.chat.close()


async def _sweep(role: Role, service: Service) -> None:
    """Drop what nobody finished, and count what is open."""
    while True:
        while (swept := await service.rollouts.sweep()) > 0:
            get_logger().warning("rollouts abandoned", count=swept)
            service.metrics.rollouts.labels("dropped").inc(swept)
            if swept < _SWEPT_AT_ONCE:
                break
        role.status.fact(rollouts=int(await cast(Any, role.client).zcard(role.keys.rollouts)))
        await asyncio.sleep(_SWEEP_S)


async def _report(role: Role, service: Service) -> None:
    while True:
        busy = service.gate.in_hand
        role.status.fact(requests=busy)
        if role.stop.is_set():
            role.status.waiting(f"{busy} requests to end (draining)")
        else:
            role.status.waiting(None if busy else "requests")
        await asyncio.sleep(_REPORT_S)
