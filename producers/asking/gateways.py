"""Where rollout servers call back: the address that the operator gave, or the gateways of this host."""

from __future__ import annotations

from zlib import crc32

from pipeline.config.types import Config


def gateway_urls(config: Config) -> list[str]:
    """At least one."""
    if config.rollout.gateway_url:
        return [config.rollout.gateway_url.rstrip("/")]
    first = config.gateway.port
    return [f"http://127.0.0.1:{port}" for port in range(first, first + max(1, config.gateway.count))]


def called_back_at(config: Config, rollout_id: str) -> str:
    """The same gateway each time that a rollout is asked for: the address is part of the question."""
    urls = gateway_urls(config)
    return urls[crc32(rollout_id.encode()) % len(urls)]
