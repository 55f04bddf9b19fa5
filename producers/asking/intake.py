"""Rows that become rollouts of a rollout server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from pipeline.queue import Credit, Outcome
from pipeline.queue.rollouts import RolloutHead, Rollouts
from pipeline.run.role import Role
from producers.asking.asker import Asker
from producers.asking.gateways import gateway_urls
from producers.asking.heads import heads_of
from producers.asking.peer import GATEWAY_KEY, SERVER_KEY, Peer, peer_session
from producers.sources import Row


class RolloutIntake:
    """Opens rollouts within credit and asks for them; no more than can be asked for are open."""

    def __init__(self, role: Role, rollouts: Rollouts, asker: Asker) -> None:
        self._role, self._rollouts, self._asker = role, rollouts, asker
        self.chunk = role.config.producer.group_size  # one row's

    def items(self, row: Row, epoch: int) -> list[RolloutHead]:
        """The group of one row."""
        return heads_of(self._role.config, row, epoch)

    def sequences(self, item: RolloutHead) -> list[str]:
        """Its first part, which every rollout has."""
        return [item.rollout_id]

    async def room(self) -> bool:
        """Wait for a free place; False when asked to stop."""
        return await self._asker.fewer_than(self._role.config.rollout.max_concurrent)

    async def enqueue(
        self, heads: Sequence[RolloutHead], /, credit: Credit, cursors: Sequence[str] = (), *, behind: str = ""
    ) -> list[Outcome]:
        """Open them, and ask for those that were not open before."""
        outcomes = await self._rollouts.open(heads, credit, cursors, behind=behind)
        self._asker.ask(head for head, word in zip(heads, outcomes, strict=True) if word == "enqueued")
        return outcomes

    async def settled(self) -> bool:
        """Wait until every rollout is closed; False when asked to stop."""
        while await self._asker.fewer_than(1):
            left = [head for head in await self._rollouts.still_open() if head.request]
            if not left:
                return True
            self._asker.ask(left)
        return False


@contextlib.asynccontextmanager
async def rollout_intake(role: Role, url: str) -> AsyncGenerator[RolloutIntake]:
    """Waits for the peers, asks anew for what an earlier producer left open, and leaves it open at the end."""
    config = role.config
    gateway_url = gateway_urls(config)[0]
    rollouts = Rollouts(role.client, role.keys, partitions=config.consumer.count, ttl_s=config.gateway.rollout_ttl_s)
    session = peer_session(url, gateway_url, timeout_s=config.rollout.timeout_s, pool=2 * config.rollout.max_concurrent)
    async with session, asyncio.TaskGroup() as tasks:
        server = Peer(session, "the rollout server", url, SERVER_KEY)
        asker = Asker(role, rollouts, server, Peer(session, "the gateway", gateway_url, GATEWAY_KEY), tasks)
        if await asker.wait_for_peers():
            asker.ask(await rollouts.still_open())
        try:
            yield RolloutIntake(role, rollouts, asker)
        finally:
            asker.leave()
