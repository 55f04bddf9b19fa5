"""Rows that become rollouts of a rollout server: one RolloutHead for each member of a row's group.

The request is stored with the open rollout so that a restart can post it again; it contains no addresses or keys.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import DataError
from sluice.pipeline.queue import Credit, Outcome, rollout_group_for
from sluice.pipeline.queue.rollouts import RolloutHead, Rollouts
from sluice.pipeline.run.role import Role
from sluice.producers.rollout_client.dispatcher import Dispatcher, gateway_urls
from sluice.producers.rollout_client.peer import GATEWAY_KEY, SERVER_KEY, Peer, peer_session
from sluice.producers.source import Row, identity


class RolloutIntake:
    """Opens rollouts within credit and requests them; never opens more than can be requested."""

    def __init__(self, role: Role, rollouts: Rollouts, dispatcher: Dispatcher) -> None:
        self._role, self._rollouts, self._dispatcher = role, rollouts, dispatcher
        self.chunk = role.config.producer.group_size  # one row's

    def items(self, row: Row, epoch: int) -> list[RolloutHead]:
        """The group of one row."""
        return heads_of(self._role.config, row, epoch)

    def sequences(self, item: RolloutHead) -> list[str]:
        """Its first part, which every rollout has."""
        return [item.rollout_id]

    async def room(self) -> bool:
        """Wait for a free slot; False when asked to stop."""
        return await self._dispatcher.fewer_than(self._role.config.rollout.max_concurrent)

    async def enqueue(
        self, heads: Sequence[RolloutHead], /, credit: Credit, cursors: Sequence[str] = (), *, behind: str = ""
    ) -> list[Outcome]:
        """Open them, and request those that weren't open before."""
        outcomes = await self._rollouts.open(heads, credit, cursors, behind=behind)
        self._dispatcher.ask(head for head, word in zip(heads, outcomes, strict=True) if word == "enqueued")
        return outcomes

    async def settled(self) -> bool:
        """Wait until every rollout is closed; False when asked to stop."""
        while await self._dispatcher.fewer_than(1):
            left = [head for head in await self._rollouts.still_open() if head.request]
            if not left:
                return True
            self._dispatcher.ask(left)
        return False


@contextlib.asynccontextmanager
async def rollout_intake(role: Role, url: str) -> AsyncGenerator[RolloutIntake]:
    """Waits for the peers, requests what an earlier producer left open, and leaves open rollouts open at the end."""
    config = role.config
    gateway_url = gateway_urls(config)[0]
    rollouts = Rollouts(role.client, role.keys, partitions=config.consumer.count, ttl_s=config.gateway.rollout_ttl_s)
    session = peer_session(url, gateway_url, timeout_s=config.rollout.timeout_s, pool=2 * config.rollout.max_concurrent)
    async with session, asyncio.TaskGroup() as tasks:
        server = Peer(session, "the rollout server", url, SERVER_KEY)
        dispatcher = Dispatcher(role, rollouts, server, Peer(session, "the gateway", gateway_url, GATEWAY_KEY), tasks)
        if await dispatcher.wait_for_peers():
            dispatcher.ask(await rollouts.still_open())
        try:
            yield RolloutIntake(role, rollouts, dispatcher)
        finally:
            dispatcher.leave()


def heads_of(config: Config, row: Row, epoch: int) -> list[RolloutHead]:
    """The members of a row's group, in index order. Raises DataError for a row with images."""
    name, n = identity(row), config.producer.group_size
    if row.images:
        raise DataError(
            f"row {name[:80]}: the rollout protocol does not support images; remove them, or unset rollout.url"
        )
    group = rollout_group_for(config.run, name, epoch, config.sampling, n)
    metadata = {**row.metadata, "row": name[:256], "epoch": epoch}
    return [
        RolloutHead(
            rollout_id=f"{group}:{index}",
            group_id=group,
            group_size=n,
            index=index,
            task=config.rollout_matching.task,
            truth=row.truth,
            metadata=metadata,
            request=_request(config, f"{group}:{index}", row, metadata),
        )
        for index in range(n)
    ]


def _request(config: Config, rollout_id: str, row: Row, metadata: dict[str, Any]) -> dict[str, Any]:
    """The fields of the protocol's RolloutRequest, except `server_url` and `callback_api_key`."""
    sampling, rollout = config.sampling, config.rollout
    return {
        "rollout_id": rollout_id,
        "messages": row.messages,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop) or None,
            "logprobs": True,
        },
        "tokenizer_name": rollout.tokenizer_name,
        "tool_server_url": rollout.tool_server_url,
        "max_turns": rollout.max_turns,
        "max_tokens_total": rollout.max_tokens_total,
        "metadata": metadata,
    }
