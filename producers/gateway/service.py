"""What the gateway's routes work with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from redis import RedisError
from redis.asyncio import Redis

from pipeline.config.types import Config
from pipeline.http.addresses import AllowedHosts
from pipeline.prompts.admission import Limits
from pipeline.prompts.turn_tokens import Renderer
from pipeline.queue import JobQueue
from pipeline.queue.replies import Replies
from pipeline.queue.rollouts import Rollouts
from pipeline.wire.keys import Keys
from producers.gateway.chat import Chat
from producers.gateway.closing import Closing
from producers.gateway.decoding import Decoding
from producers.gateway.in_hand import Gate
from producers.gateway.inference import Inference
from producers.gateway.metrics import Metrics
from producers.gateway.tool_calls import load_tool_parser
from producers.tokenizer import text_decoder

_PING_S = 2.0


@dataclass(frozen=True)
class Service:
    """One process's parts."""

    config: Config
    client: Redis
    replies: Replies
    decoding: Decoding
    rollouts: Rollouts
    chat: Chat
    closing: Closing
    inference: Inference
    gate: Gate
    metrics: Metrics
    limits: Limits
    decode: Callable[[Sequence[int]], str]  # token ids to text without special tokens

    async def broker_answers(self) -> bool:
        """Now, and not after the client's patience."""
        try:
            async with asyncio.timeout(_PING_S):
                await self.client.ping()  # type: ignore[misc]
        except (TimeoutError, OSError, RedisError):
            return False
        return True


def make_service(
    config: Config, client: Redis, keys: Keys, renderer: Renderer, registry: CollectorRegistry | None = None
) -> Service:
    """`replies.run` and `decoding.run` are the caller's to spawn; `registry` is the process's. Raises ConfigError."""
    gateway, metrics = config.gateway, Metrics(registry)
    partitions = config.consumer.count
    replies = Replies(client, keys)
    queue = JobQueue(client, keys, partitions=partitions, keep_result_s=config.worker.keep_result_s)
    decoding = Decoding(queue, replies, gateway.request_timeout_s)
    rollouts = Rollouts(client, keys, partitions=partitions, ttl_s=gateway.rollout_ttl_s)
    parts: dict[str, Any] = {"decoding": decoding, "rollouts": rollouts, "metrics": metrics}
    parser = load_tool_parser(gateway.tool_parser)
    chat = Chat(config, replies.name, renderer=renderer, parser=parser, **parts)
    inference = Inference(config, replies.name, decoding, AllowedHosts(config.images.hosts, "images.hosts"))
    return Service(
        config=config,
        client=client,
        replies=replies,
        chat=chat,
        closing=Closing(rollouts, metrics),
        inference=inference,
        gate=Gate(gateway.max_requests, metrics),
        limits=Limits.of_model(config.model.path),
        decode=text_decoder(renderer),
        **parts,
    )
