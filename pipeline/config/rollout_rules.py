"""Number rules of the gateway, the rollout server, and who asks it for rollouts."""

from __future__ import annotations

from math import inf

from pipeline.config.types import Config

_LAST_PORT = 65_535


def rollout_checks(config: Config) -> list[tuple[bool, str]]:
    """(holds, complaint) for each rule."""
    gateway, server, rollout = config.gateway, config.rollout_server, config.rollout
    positive = {
        "gateway.max_requests": gateway.max_requests,
        "gateway.request_timeout_s": gateway.request_timeout_s,
        "gateway.rollout_ttl_s": gateway.rollout_ttl_s,
        "gateway.stream_tokens": gateway.stream_tokens,
        "gateway.max_body_mb": gateway.max_body_mb,
        "rollout_server.tokenizer_cache_size": server.tokenizer_cache_size,
        "rollout_server.http_client_timeout_s": server.http_client_timeout_s,
        "rollout_server.max_concurrent_rollouts": server.max_concurrent_rollouts,
        "rollout_server.deadline_s": server.deadline_s,
        "rollout_server.keep_answers_s": server.keep_answers_s,
        "rollout_server.keep_answers": server.keep_answers,
        "rollout_server.tool_timeout_s": server.tool_timeout_s,
        "rollout_server.max_tool_calls": server.max_tool_calls,
        "rollout_server.max_body_mb": server.max_body_mb,
        "rollout.max_concurrent": rollout.max_concurrent,
        "rollout.max_turns": rollout.max_turns,
        "rollout.max_tokens_total": rollout.max_tokens_total,
        "rollout.timeout_s": rollout.timeout_s,
    }
    found = [(0 < value < inf, f"{key} must be a finite number > 0, got {value}") for key, value in positive.items()]
    not_negative = {
        "gateway.count": gateway.count,
        "rollout_server.count": server.count,
        "rollout_server.max_waiting_rollouts": server.max_waiting_rollouts,
    }
    found += [(value >= 0, f"{key} must be >= 0, got {value}") for key, value in not_negative.items()]
    for name, section in (("gateway", gateway), ("rollout_server", server)):
        last = section.port + max(0, section.count - 1)
        complaint = f"{name}.port must be in 0..{_LAST_PORT}, that of the last of {name}.count too, got {section.port}"
        found.append((section.port >= 0 and last <= _LAST_PORT, complaint))
    low, high = server.tool_latency_ms
    found.append((0 <= low <= high, f"rollout_server.tool_latency_ms must be [low, high], 0 <= low, got {[low, high]}"))
    ttl, call = gateway.rollout_ttl_s, gateway.request_timeout_s
    complaint = f"gateway.rollout_ttl_s must be > gateway.request_timeout_s ({call:g}), which a call may take: {ttl:g}"
    found.append((ttl > call, complaint))
    return [*found, *_of_the_protocol(config)]


def _of_the_protocol(config: Config) -> list[tuple[bool, str]]:
    """What a rollout server would refuse."""
    rollout, budget = config.rollout, config.rollout.max_tokens_total
    found = [
        (rollout.max_turns <= 100, f"rollout.max_turns must be <= 100, got {rollout.max_turns}"),
        (budget <= 1_000_000, f"rollout.max_tokens_total must be <= 1000000, got {budget}"),
    ]
    if rollout.url is not None:
        warmest, longest = config.sampling.temperature, config.sampling.max_new_tokens
        found.append((warmest <= 2, f"sampling.temperature must be <= 2 with rollout.url, got {warmest}"))
        found.append((longest <= 32_768, f"sampling.max_new_tokens must be <= 32768 with rollout.url, got {longest}"))
    return found
