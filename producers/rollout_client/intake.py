"""Rows that become rollouts of a rollout server: one RolloutHead for each member of a row's group.

The request is stored with the open rollout so that a restart can post it again; it contains no addresses or keys.
Images are named in its messages, by URL or by the digest of a picture in `images.store`, where the gateway finds it;
the producer puts those there that the row names by path or digest. A row with an image that can't be read is malformed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import Config, ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.paths import Roots
from sluice.pipeline.images.store import (
    ImageWriter,
    check_digest,
    describe,
    find_file,
    images_of_run,
    neither,
    normal_ref,
)
from sluice.pipeline.images.urls import UrlFetcher
from sluice.pipeline.prompts.admission import IMAGE_KINDS, media_kind
from sluice.pipeline.queue import Credit, Outcome, rollout_group_for
from sluice.pipeline.queue.rollouts import RolloutHead, Rollouts
from sluice.pipeline.run.role import Role
from sluice.pipeline.wire.messages import ImageRef, Message
from sluice.producers.rollout_client.dispatcher import Dispatcher, gateway_urls
from sluice.producers.rollout_client.peer import GATEWAY_KEY, SERVER_KEY, Peer, peer_session
from sluice.producers.source import Row, identity, read_first


class RolloutIntake:
    """Opens rollouts within credit and requests them; never opens more than can be requested."""

    def __init__(self, role: Role, rollouts: Rollouts, dispatcher: Dispatcher) -> None:
        self._role, self._rollouts, self._dispatcher = role, rollouts, dispatcher
        self._writer = ImageWriter.of(role.config)
        self.chunk = role.config.producer.group_size  # one row's

    def items(self, row: Row, epoch: int, number: int) -> list[RolloutHead]:
        """The group of one row."""
        return heads_of(self._role.config, row, epoch, self._writer)

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
            if not await self._dispatcher.ask_lost():
                return True
        return False


def first_heads(config: Config, count: int) -> list[list[RolloutHead]]:
    """The groups of the first `count` rows, as a run would open them; images' bytes are then in the run's store.

    The entry point `sluice.checks: heads`. Blocks, not on an event loop; raises DataError for a malformed row,
    StoreError.
    """
    writer = ImageWriter.of(config)
    return read_first(config, count, lambda row: heads_of(config, row, 0, writer))


@contextlib.asynccontextmanager
async def evaluated_rollouts(role: Role, rollouts: Rollouts) -> AsyncGenerator[Dispatcher]:
    """Requests the rollouts of an evaluation, once both peers are up; at the end open ones stay open.

    The entry point `sluice.rollouts: evaluated`. Raises DeadlineExceeded, ConfigError.
    """
    async with _dispatcher(role, rollouts) as (dispatcher, _):
        yield dispatcher


@contextlib.asynccontextmanager
async def rollout_intake(role: Role, owner: Ownership) -> AsyncGenerator[RolloutIntake]:
    """Waits for the peers, requests what an earlier producer left open or the broker opens again by losing its newest
    writes, and leaves open rollouts open at the end.
    """
    rollouts = Rollouts.of(role.client, role.keys, role.config, producer=owner)
    async with _dispatcher(role, rollouts) as (dispatcher, is_up):
        if is_up:
            await dispatcher.ask_lost()
            dispatcher.look_for_lost()
        yield RolloutIntake(role, rollouts, dispatcher)


@contextlib.asynccontextmanager
async def _dispatcher(role: Role, rollouts: Rollouts) -> AsyncGenerator[tuple[Dispatcher, bool]]:
    """With whether both peers are up; False when asked to stop."""
    config, url, gateway_url = role.config, str(role.config.rollout.url), gateway_urls(role.config)[0]
    session = peer_session(url, gateway_url, timeout_s=config.rollout.timeout_s, pool=2 * config.rollout.max_concurrent)
    async with session, asyncio.TaskGroup() as tasks:
        server = Peer(session, "the rollout server", url, SERVER_KEY)
        dispatcher = Dispatcher(role, rollouts, server, Peer(session, "the gateway", gateway_url, GATEWAY_KEY), tasks)
        is_up = await dispatcher.wait_for_peers()
        try:
            yield dispatcher, is_up
        finally:
            dispatcher.leave()


def heads_of(config: Config, row: Row, epoch: int, writer: ImageWriter) -> list[RolloutHead]:
    """The members of a row's group, in index order.

    Blocks, not on an event loop; raises RequestError for an image that can't be read, StoreError.
    """
    name, n = identity(row), config.producer.group_size
    messages = _with_images(config, writer, row)
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
            keep_messages=config.rollout_matching.reward is not None,
            request=_request(config, f"{group}:{index}", messages, metadata),
        )
        for index in range(n)
    ]


def _with_images(config: Config, writer: ImageWriter, row: Row) -> list[Message]:
    """The row's messages, with each image part naming its image. Raises RequestError, StoreError."""
    urls = [_url(config, writer, ref) for ref in row.image_refs()]
    if not urls:
        return row.messages
    left = iter(urls)

    def named(part: Any) -> Any:
        is_image = media_kind(part) in IMAGE_KINDS
        return {"type": "image_url", "image_url": {"url": next(left)}} if is_image else part

    contents = [message["content"] for message in row.messages]
    return [
        {**message, "content": [named(part) for part in content]} if isinstance(content, list) else message
        for message, content in zip(row.messages, contents, strict=True)
    ]


def _url(config: Config, writer: ImageWriter, ref: ImageRef) -> str:
    """Its URL, or the digest of its bytes, which are then in the store. Raises RequestError, StoreError.

    A URL with a digest is fetched: nobody behind the protocol would compare them.
    """
    ref, where = normal_ref(ref), describe(ref)
    if ref.sha256 is not None and writer.has(ref.sha256):
        return f"sha256:{ref.sha256}"
    images = images_of_run(config)
    roots = Roots(images.roots, may_lack=images.store)
    found, refusal = find_file(roots, ref, where)
    if found is not None:
        data = roots.read(found, int(config.images.max_mb * 2**20), where)
    elif ref.sha256 is None:
        return str(ref.url)
    else:
        try:
            data = asyncio.run(_fetch(config.images, str(ref.url), where))
        except RequestError as error:
            if refusal is None:
                raise
            raise neither(error, refusal, where) from error
    check_digest(data, ref.sha256, where)
    return f"sha256:{writer.put(data, where)}"


async def _fetch(limits: ImagesConfig, url: str, where: str) -> bytes:
    fetcher = UrlFetcher(limits)
    try:
        return await fetcher.fetch(url, where)
    finally:
        await fetcher.close()


def _request(config: Config, rollout_id: str, messages: list[Message], metadata: dict[str, Any]) -> dict[str, Any]:
    """The fields of the protocol's RolloutRequest, except `server_url` and `callback_api_key`."""
    sampling, rollout = config.sampling, config.rollout
    return {
        "rollout_id": rollout_id,
        "messages": messages,
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
