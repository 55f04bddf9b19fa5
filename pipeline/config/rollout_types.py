"""Settings of agent rollouts: the gateway, the rollout server, and who asks it for rollouts.

Bearer keys are no part of the configuration, which is stored with the run: SLUICE_GATEWAY_API_KEY and
SLUICE_ROLLOUT_API_KEY.
"""

from __future__ import annotations

from typing import Literal

from pipeline.config.section import Section


class GatewayConfig(Section, frozen=True, kw_only=True):
    """`sluice gateway`: OpenAI-style completions over the decode queue."""

    count: int = 0  # gateways that `up` and `run` start on this host
    host: str = "127.0.0.1"  # where it listens; set a key before it is not loopback
    port: int = 8081  # of the first one; the others follow
    names: tuple[str, ...] = ()  # without a key: by which callers may ask it, besides localhost and its own address
    model_name: str = "policy"  # in /v1/models; `default` is always known
    max_requests: int = 512  # in hand at a time; more are answered 429
    request_timeout_s: float = 240.0  # below what its callers wait for, so that they are told what was waited for
    rollout_ttl_s: float = 3600.0  # a rollout without a call for this long is dropped, reason abandoned
    stream_tokens: int = 4  # a streaming caller hears of this many tokens at a time
    tool_parser: str = "hermes"  # how the model writes tool calls: hermes, or package.module:function
    max_body_mb: float = 16  # of one request


class RolloutServerConfig(Section, frozen=True, kw_only=True):
    """`sluice rollout-server`: the agent loop and its tools."""

    count: int = 0  # servers that `up` and `run` start on this host
    host: str = "127.0.0.1"  # where it listens; set a key before it is not loopback
    port: int = 9000  # of the first one; the others follow
    names: tuple[str, ...] = ()  # without a key: by which callers may ask it, besides localhost and its own address
    tokenizers: dict[str, str] = {}  # name that a caller gives → model directory or hub id; empty: policy → model.path
    tokenizer_cache_size: int = 5  # tokenizers in memory
    tokenizer_trust_remote_code: bool = False  # runs code of a listed tokenizer
    http_client_timeout_s: float = 300.0  # of one call
    max_concurrent_rollouts: int = 100  # that run; others wait in line
    max_waiting_rollouts: int = 400  # beyond those that run; more are answered 429
    deadline_s: float = 600.0  # of one rollout, callbacks included
    keep_answers_s: float = 3600.0  # how long a repeated id is given its first answer
    keep_answers: int = 10_000  # the newest
    hosts: tuple[str, ...] = ()  # "host", "host:port" or "host:*", that requests may name, besides those of this file
    tools: tuple[str, ...] = ("calculator",)  # or package.module:name of a tool of your own
    tool_latency_ms: tuple[int, int] = (10, 100)  # simulated by the calculator
    tool_timeout_s: float = 60.0  # of one call
    max_tool_calls: int = 32  # of one turn; the model is told which of its calls were not run
    template_tools: bool = True  # the tools are given to the chat template
    template_drift: Literal["error", "warn"] = "error"  # warn: for trainers that are not ours
    max_body_mb: float = 16  # of one request


class RolloutConfig(Section, frozen=True, kw_only=True):
    """What `sluice produce` asks a rollout server for."""

    url: str | None = None  # of the rollout server; None: prompts become decode jobs
    gateway_url: str | None = None  # where it calls back; None: the gateways of this host, in turns
    protocol: Literal["sync", "async"] = "sync"  # async: the answer is called back
    tokenizer_name: str = "policy"  # that the server is asked to use
    tool_server_url: str | None = None  # an MCP server with more tools
    max_concurrent: int = 64  # rollouts in hand
    max_turns: int = 10  # advice to the server
    max_tokens_total: int = 8192  # advice to the server; of one rollout's context
    timeout_s: float = 900.0  # of one rollout, the server's line included
