"""Shared parts of the gateway's routes; at most `gateway.max_requests` requests, each only while its caller waits."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Header, Path, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry
from redis import RedisError
from redis.asyncio import Redis
from starlette.types import Receive, Scope, Send

from sluice.pipeline.config.types import Config
from sluice.pipeline.prompts.admission import Limits
from sluice.pipeline.prompts.detokenizer import TextDecoder
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.pipeline.queue import JobQueue
from sluice.pipeline.queue.replies import Replies
from sluice.pipeline.queue.rollouts import Rollouts
from sluice.pipeline.telemetry.spans import Waterfall
from sluice.pipeline.telemetry.tracing import Tracing
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DecodeJob, SamplingParams, SequenceResult, TokenDelta
from sluice.producers.gateway.answers import Answer, with_error
from sluice.producers.gateway.chat import Chat, ChatCall
from sluice.producers.gateway.decoding import Decoding, Exported
from sluice.producers.gateway.images import RequestImages
from sluice.producers.gateway.metrics import Metrics
from sluice.producers.gateway.parsers import load_parser, load_reasoning_parser
from sluice.producers.gateway.refusals import Refusal
from sluice.producers.gateway.text_stream import TextStream
from sluice.producers.http.schemas import MAX_ID_LENGTH, ROLLOUT_ID
from sluice.producers.tokenizer import token_namer

JSON = "application/json"

RolloutHeader = Annotated[str | None, Header(description="Instead of `rollout_id` in the body.")]
RolloutPath = Annotated[str, Path(description="Instead of `rollout_id` in the body.", examples=["r-1"])]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=MAX_ID_LENGTH,
        description="A repeated call with the same key gets the same answer. With a `rollout_id` every call does.",
    ),
]

SCOPE = f"/rollouts/{ROLLOUT_ID}"


class Events(StreamingResponse):
    """A stream that releases its resources however it ends."""

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


_PING_S = 2.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Service:
    """One process's parts."""

    config: Config
    client: Redis
    replies: Replies
    decoding: Decoding
    rollouts: Rollouts
    chat: Chat
    images: RequestImages
    keys: Keys
    gate: Gate
    metrics: Metrics
    tracing: Tracing | None
    name: str  # of the process
    limits: Limits
    renderer: Renderer
    decode: TextDecoder
    token_names: Callable[[int], dict[str, Any]]  # `token` and `bytes` of an entry of logprobs

    @property
    def max_model_len(self) -> int | None:
        """The engine's limit, else the model's context; None: unknown."""
        worker = self.config.worker
        limit = worker.vllm.max_model_len if worker.backend == "vllm" else None
        return limit or self.limits.context

    async def broker_answers(self) -> bool:
        """Whether it answers right now, without waiting for the client's retries."""
        try:
            async with asyncio.timeout(_PING_S):
                await self.client.ping()  # type: ignore[misc]
        except (TimeoutError, OSError, RedisError):
            return False
        return True

    async def rendered(self, work: Callable[[], _T]) -> _T:
        """Run it off the event loop, within the time of a request. Raises Refusal (504), and what it raises."""
        until = time.monotonic() + self.config.gateway.request_timeout_s
        return await self.chat.beside(work, until, "rendering the prompt")

    def text_stream(self, call: ChatCall, sampling: SamplingParams) -> TextStream:
        """Of the only answer."""
        return TextStream(self.decode, sampling.stop, self.chat.marker(call))

    async def respond(
        self,
        request: Request,
        source: AsyncGenerator[TokenDelta | Answer],
        *,
        stream: bool | None,
        whole: Callable[[Answer], Any],
        events: Callable[[AsyncIterator[TokenDelta | Answer]], AsyncIterator[bytes]],
        keep: Callable[[Answer], Awaitable[None]] | None = None,
        error: Callable[[Refusal], bytes] | None = None,
    ) -> Response:
        """A call's answer: JSON of `whole`, once `keep` has it, or `events` as they come. Raises Refusal.

        Refusals come before the first byte; what goes wrong later is the last event, in the form of `error`.
        """
        async with AsyncExitStack() as held:
            held.enter_context(self.gate.enter())
            await held.enter_async_context(aclosing(source))
            first = await unless_gone(request, anext(source))
            if isinstance(first, Answer) and not stream:
                self.count_tokens(first)
                if keep is not None:
                    await keep(first)
                return Response(msgspec.json.encode(whole(first)), media_type=JSON)
            return Events(with_error(events(self.counted(first, source)), error), held.pop_all())
        raise AssertionError("unreachable")

    async def counted(
        self, first: TokenDelta | Answer, rest: AsyncGenerator[TokenDelta | Answer]
    ) -> AsyncIterator[TokenDelta | Answer]:
        """All events of a stream; its tokens are counted when its answer comes."""
        one: TokenDelta | Answer | None = first
        while one is not None:
            if isinstance(one, Answer):
                self.count_tokens(one)
            yield one
            one = await anext(rest, None)

    def count_tokens(self, answer: Answer) -> None:
        """For the metrics."""
        self.metrics.tokens.labels("prompt").inc(len(answer.results[0].prompt_token_ids))
        self.metrics.tokens.labels("completion").inc(sum(len(result.token_ids) for result in answer.results))


def make_service(
    config: Config,
    client: Redis,
    keys: Keys,
    renderer: Renderer,
    registry: CollectorRegistry | None = None,
    tracing: Tracing | None = None,
    name: str = "",
) -> Service:
    """The caller must spawn `replies.run` and `decoding.run`; `registry` is the process's. Raises ConfigError."""
    gateway, metrics = config.gateway, Metrics(registry)
    partitions = config.consumer.count
    replies = Replies(client, keys)
    queue = JobQueue(client, keys, partitions=partitions, keep_result_s=config.worker.keep_result_s)
    exported = None if tracing is None or not tracing.enabled else _exporter(config, tracing, name)
    decoding = Decoding(queue, replies, gateway.request_timeout_s, exported)
    rollouts = Rollouts.of(client, keys, config)
    parts: dict[str, Any] = {"decoding": decoding, "rollouts": rollouts, "metrics": metrics}
    parser = load_parser(gateway.tool_parser, renderer.tokenizer)
    reasoning = load_reasoning_parser(gateway.reasoning_parser, renderer.tokenizer)
    images = RequestImages(config, model_takes_images=bool(renderer.placeholders))
    chat = Chat(config, replies.name, renderer=renderer, parser=parser, reasoning=reasoning, images=images, **parts)
    return Service(
        config=config,
        client=client,
        replies=replies,
        chat=chat,
        images=images,
        keys=keys,
        gate=Gate(gateway.max_requests, metrics),
        tracing=tracing,
        name=name,
        limits=Limits.of_model(config.model.path, images=config.images.max_per_prompt, data_urls=True),
        renderer=renderer,
        decode=TextDecoder(renderer.tokenizer),
        token_names=token_namer(renderer),
        **parts,
    )


def _exporter(config: Config, tracing: Tracing, name: str) -> Exported:
    model = pathlib.Path(config.model.path).name

    def export(job: DecodeJob, results: Sequence[SequenceResult]) -> None:
        spans = Waterfall(job.job_id, job.trace, model=model)
        if spans.ref.sampled:
            spans.answered(results, name, time.time())
            tracing.send(spans.spans)

    return export


class Gate:
    """Admits `most` requests at a time; the others are told to retry."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most, self.in_hand = most, 0
        self._metrics = metrics

    @contextlib.contextmanager
    def enter(self, count: int = 1) -> Iterator[None]:
        """Room for `count` prompts while the block lasts. Raises Refusal (429; 400 if `count` exceeds the total)."""
        if count > self.most:
            raise Refusal(400, f"{count} prompts in one request; the limit is {self.most} (gateway.max_requests)")
        if self.in_hand + count > self.most:
            raise Refusal(
                429, f"{self.in_hand} requests are in progress, the limit is {self.most} (gateway.max_requests)"
            )
        self._add(count)
        try:
            yield
        finally:
            self._add(-count)

    def _add(self, count: int) -> None:
        self.in_hand += count
        self._metrics.in_flight.set(self.in_hand)


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The work's result; it is cancelled if the caller disconnects. Raises Refusal (499, which nobody reads)."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(499, "the caller disconnected")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
