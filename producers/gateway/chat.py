"""A call from request to answer: a plain one, or the next turn of a rollout, of messages or of tokens.

    request ─ plan_turn ─▶ DecodeJob(reply_to) ─ Decoding ─▶ deltas, result ─ Rollouts.add ─▶ Answer

- A rollout's turn is stored before it is answered; repeats get the stored turn.
- Prompts are rendered off the event loop, several at once; a long one takes seconds, which count toward the call's
  time limit.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from pydantic import BaseModel

from sluice.pipeline.config.suggest import nearest
from sluice.pipeline.config.types import Config, PolicyConfig
from sluice.pipeline.errors import DeadlineExceeded
from sluice.pipeline.logs import get_logger
from sluice.pipeline.prompts.admission import MAX_TURNS
from sluice.pipeline.prompts.chat_template import RESERVED, has_variable
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.pipeline.queue.rollouts import Rollout, RolloutHead, Rollouts, Turn, mark_of
from sluice.pipeline.queue.trained import trained_among
from sluice.pipeline.thread_pool import ThreadPool
from sluice.pipeline.wire.keys import is_evaluated_rollout, tagged
from sluice.pipeline.wire.messages import EVALUATION, DecodeJob, Message, SamplingParams, SequenceResult, TokenDelta
from sluice.pipeline.wire.tokens import TokenArray
from sluice.producers.gateway.answers import Answer
from sluice.producers.gateway.decoding import Decoding
from sluice.producers.gateway.images import RequestImages, Taken
from sluice.producers.gateway.metrics import Metrics
from sluice.producers.gateway.parsers import (
    NO_TOOLS,
    AnswerReader,
    Parsed,
    ToolChoice,
    ToolParser,
    VllmReasoningParser,
    assistant_message,
    with_calls,
)
from sluice.producers.gateway.refusals import Refusal, closed, parent_lost, trained, unknown
from sluice.producers.gateway.turns import Plan, digest, known_token_ids, path_to, plan_tokens, plan_turn
from sluice.producers.http.schemas import JsonObject

T = TypeVar("T")

_RENDERERS = 4  # tokenizing releases the GIL


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A conversation, in OpenAI's messages, whatever the API it came by."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[Any] = ()
    response_mask: Sequence[int] | None = None
    count: int = 1
    stream: bool | None = False
    rollout_id: str | None = None
    tool_choice: ToolChoice = NO_TOOLS
    template_kwargs: JsonObject = field(default_factory=dict[str, Any])
    logprobs: bool = False  # asked for; a rollout's turns have them anyway

    @property
    def parses_tools(self) -> bool:
        """Whether the answer is parsed for tool calls."""
        return self.tool_choice.parses


@dataclass(frozen=True, slots=True)
class TokenCall:
    """A prompt of token ids."""

    model: str
    token_ids: list[int]
    count: int = 1
    stream: bool | None = False
    rollout_id: str | None = None
    logprobs: bool = False  # as of a ChatCall


def alone_in_group(policy: PolicyConfig) -> str:
    """Why a group of one trains nothing under this policy; empty if it does."""
    if not policy.enabled or (policy.advantage in ("reward", "reinforce_pp") and not policy.by_pairs):
        return ""
    what = f"policy.loss {policy.loss}" if policy.by_pairs else f"policy.advantage {policy.advantage}"
    return (
        f"{what} compares the rollouts of a group, so a group of one has advantage 0; open them with "
        "POST /v1/rollouts and a group_id, group_size and index, or set policy.advantage to reward"
    )


async def refuse_trained(config: Config, rollout_id: str) -> None:
    """Raise Refusal for an id that this run has trained; a host without the run's directory can't tell."""
    if await asyncio.to_thread(trained_among, Path(config.run_dir) / config.run, [rollout_id]):
        raise trained(rollout_id)


def unscored(sampling: SamplingParams) -> SamplingParams:
    """The same without the sampled tokens' logprobs, which nobody asked for."""
    return msgspec.structs.replace(sampling, logprobs=False, top_logprobs=None)


_REQUEST = "request_digest"  # in the metadata of a job with an idempotency key


@dataclass(frozen=True, slots=True)
class Once:
    """A call with an `Idempotency-Key`: its job is named by the key, and its answer is kept (worker.keep_result_s)."""

    name: str
    digest: str  # of the request

    @classmethod
    def of(cls, key: str | None, request: BaseModel, count: int, place: int = 0) -> Once | None:
        """None without a key. `place`: of the prompt, if there are several. Streamed or not makes no difference."""
        if key is None:
            return None
        sent = request.model_dump(mode="json", exclude={"stream", "stream_options", "request_id"})
        return cls(digest([type(request).__name__, key, count, place])[:24], digest(sent))

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the job."""
        return {_REQUEST: self.digest}

    def check(self, results: Sequence[SequenceResult]) -> None:
        """Raises Refusal (400) if another request with this key made the job."""
        if any(result.metadata.get(_REQUEST) != self.digest for result in results):
            raise self.refusal

    @property
    def refusal(self) -> Refusal:
        """Of another request with the same key."""
        message = "the Idempotency-Key was used with another request; send each request its own key"
        return Refusal(400, message, "Idempotency-Key", code="idempotency_error")


class Asked(Protocol):
    """The part of a request that is the same for messages and tokens."""

    @property
    def model(self) -> str: ...
    @property
    def stream(self) -> bool | None: ...
    @property
    def rollout_id(self) -> str | None: ...
    @property
    def count(self) -> int: ...
    @property
    def logprobs(self) -> bool: ...


PlanOf = Callable[[Sequence[Turn]], Awaitable[Plan]]
"""Plans the next turn after these."""


class Chat:
    """Answers calls with messages or tokens; `name` is this process's mailbox."""

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        renderer: Renderer,
        parser: ToolParser,
        reasoning: VllmReasoningParser | None = None,
        decoding: Decoding,
        rollouts: Rollouts,
        metrics: Metrics,
        images: RequestImages,
    ) -> None:
        self._config, self._name, self._renderer, self.parser = config, name, renderer, parser
        self._decoding, self._rollouts, self._metrics = decoding, rollouts, metrics
        self._images, self._shows_text = images, reasoning is None
        ends = [renderer.tokenizer.decode([token]) for token in renderer.terminators]
        self._reader = AnswerReader(parser, reasoning, ends)
        self._rendering = ThreadPool("render", _RENDERERS)

    def close(self) -> None:
        """Stop rendering."""
        self._rendering.close()

    def marker(self, call: ChatCall) -> str | None:
        """Where the text of a stream ends for a tool call; None: nowhere, "": it comes whole."""
        if not self._shows_text:
            return ""
        return getattr(self.parser, "marker", "") if call.parses_tools else None

    @property
    def models(self) -> list[str]:
        """Valid names; the first two mean the policy, the others are adapters."""
        return ["default", self._config.gateway.model_name, *self._config.worker.adapters]

    def check_model(self, name: str, rollout_id: str | None = None) -> None:
        """Raises Refusal (404; 400 for an adapter in a rollout)."""
        if name not in self.models:
            near = nearest(name, self.models)
            meant = f"did you mean {near!r}?" if near else f"it may be {' or '.join(self.models)}"
            raise Refusal(404, f"model {name!r:.80} is not served; {meant}", "model")
        if rollout_id is not None and name in self._config.worker.adapters:
            message = f"model {name!r} is an adapter, and a rollout's tokens train the policy; use default"
            raise Refusal(400, message, "model")

    def constrained(self, call: ChatCall, sampling: SamplingParams) -> SamplingParams:
        """The sampling of a call whose answer must be tool calls. Raises Refusal (400)."""
        return with_calls(sampling, self._config.sampling, call.tool_choice, call.tools, self.parser)

    def check_template(self, kwargs: Mapping[str, Any], tools: Sequence[Any] = ()) -> None:
        """Raises Refusal (400) for a variable that the chat template doesn't have, or that the gateway sets."""
        for name in kwargs:
            path = "reasoning_effort" if name == "reasoning_effort" else f"chat_template_kwargs.{name:.80}"
            if name in RESERVED:
                raise Refusal(400, f"{path}: the gateway sets it; remove it", path)
            if not has_variable(self._renderer.tokenizer, name, tools):
                raise Refusal(400, f"{path}: the model's chat template has no such variable; remove it", path)

    async def events(
        self, call: ChatCall, sampling: SamplingParams, once: Once | None = None
    ) -> AsyncGenerator[TokenDelta | Answer]:
        """Tokens as they arrive, if the request streams, then the answer. Raises Refusal, SluiceError, RedisError."""
        until = time.monotonic() + self._config.gateway.request_timeout_s
        self.check_template(call.template_kwargs, call.tools)
        sampling = self.constrained(call, sampling)
        taken = await self._images.of_messages(call.messages, until)
        plan = partial(self._plan, call, taken, sampling, until)
        if call.rollout_id is None:
            images = taken.refs
            if images and not (
                call.tools or call.response_mask or call.template_kwargs
            ):  # workers apply the processor's own template
                prompt: dict[str, Any] = {"messages": taken.messages, "images": images}
            else:
                planned = await plan([])
                prompt = {"prompt_token_ids": TokenArray(planned.prompt_token_ids), "images": images}
            await self._images.store(taken, until)
            flow = self._plain(call, prompt, sampling, until, once)
        else:
            flow = self._turn(call, call.rollout_id, plan, sampling, until, taken)
        async with aclosing(flow) as events:
            async for event in events:
                if isinstance(event, Answer):
                    yield replace(event, asked=taken.messages)
                elif call.stream:
                    yield event

    async def token_events(
        self, call: TokenCall, sampling: SamplingParams, once: Once | None = None
    ) -> AsyncGenerator[TokenDelta | Answer]:
        """The same for a prompt of token ids. Raises Refusal, SluiceError, RedisError."""
        until = time.monotonic() + self._config.gateway.request_timeout_s
        plan = partial(self._plan_tokens, call, sampling, until)
        if call.rollout_id is None:
            prompt = {"prompt_token_ids": TokenArray((await plan([])).prompt_token_ids)}
            flow = self._plain(call, prompt, sampling, until, once)
        else:
            flow = self._turn(call, call.rollout_id, plan, sampling, until)
        async with aclosing(flow) as events:
            async for event in events:
                if call.stream or isinstance(event, Answer):
                    yield event

    async def _plain(
        self, request: Asked, prompt: dict[str, Any], sampling: SamplingParams, until: float, once: Once | None
    ) -> AsyncGenerator[TokenDelta | Answer]:
        name = secrets.token_hex(12) if once is None else once.name
        metadata = {} if once is None else once.metadata
        sampling = sampling if request.logprobs else unscored(sampling)
        job = self._job(request, f"chat-{name}", sampling, n=request.count, metadata=metadata, **prompt)
        if once is not None and not await self._decoding.is_asked_by(job, once.digest):  # or a stream would show it
            raise once.refusal
        results: list[SequenceResult] = []
        async with aclosing(self._decoding.events(job, until)) as events:
            async for event in events:
                if isinstance(event, TokenDelta):
                    yield event
                else:
                    results.append(event)
        if once is None:
            self._decoding.forget_later(job)
        else:
            once.check(results)
        results.sort(key=lambda result: result.index)
        said = [self._message(request, result, f"{name}{result.index:x}") for result in results]
        yield Answer(request.model, results, said)

    async def _turn(
        self,
        request: Asked,
        rollout_id: str,
        plan_of: PlanOf,
        sampling: SamplingParams,
        until: float,
        taken: Taken | None = None,
    ) -> AsyncGenerator[TokenDelta | Answer]:
        rollout = await self._rollouts.load(rollout_id)
        if rollout is not None and rollout.state == "closed":
            raise closed(rollout_id)
        if rollout is not None and len(rollout.turns) >= MAX_TURNS:
            raise Refusal(400, f"the rollout has {len(rollout.turns)} turns, which is the limit; finish it")
        plan = await plan_of(rollout.turns if rollout else [])
        if taken is not None:
            await self._images.store(taken, until)
        if rollout is None:  # only now, so a refused call opens nothing
            rollout = await self._open(rollout_id)
            if rollout.turns:
                plan = await plan_of(rollout.turns)
        if (stored := _place_of(rollout.turns, plan.key)) is not None:
            yield _answer(request, rollout.turns, stored, resynced=plan.added.resynced)
            return
        parent = _parent(rollout.turns, plan)
        job = self._job(
            request,
            digest([rollout_id, plan.key, plan.parent, *([mark_of(parent)] if parent else [])]),
            sampling,
            prompt_token_ids=TokenArray(plan.prompt_token_ids),
            images=plan.images,
            rollout_id=rollout_id,
            turn=plan.depth,
            task=rollout.head.task,
            priority=rollout.head.priority,
            pinned_version=(pinned := rollout.head.pinned_version),
            reply_to=self._name if pinned is None else f"{EVALUATION}:{self._name}",
        )
        result: SequenceResult | None = None
        async with aclosing(self._decoding.events(job, until)) as events:
            async for event in events:
                if isinstance(event, TokenDelta):
                    yield event
                else:
                    result = event
        assert result is not None, "a job's events end with its results"
        turn = plan.turn(result, self._message(request, result, plan.key))
        turns, place = await self._add(rollout, turn, plan)
        self._decoding.forget_later(job)
        yield _answer(request, turns, place, resynced=plan.added.resynced)

    async def _open(self, rollout_id: str) -> Rollout:
        """Open the rollout for a caller that hasn't. Raises Refusal if it was closed in the meantime or trained before,
        and for one of an evaluation, which a broker has lost: it would be trained.
        """
        if is_evaluated_rollout(self._config.run, rollout_id):
            raise unknown(rollout_id)
        await refuse_trained(self._config, rollout_id)
        head = RolloutHead.alone(rollout_id, task=self._config.rollout_matching.task)
        opened = (await self._rollouts.open([head])) == ["enqueued"]
        self._metrics.rollouts.labels("opened").inc(opened)
        if opened and (problem := alone_in_group(self._config.policy)):
            get_logger().warning("a rollout that nobody opened trains nothing", rollout_id=rollout_id, why=problem)
        return await self._load(rollout_id)

    async def _load(self, rollout_id: str) -> Rollout:
        rollout = await self._rollouts.load(rollout_id)
        if rollout is None or rollout.state == "closed":
            raise closed(rollout_id)
        return rollout

    async def _add(self, rollout: Rollout, turn: Turn, plan: Plan) -> tuple[Sequence[Turn], int]:
        """The rollout's turns, and the index of this one, or of a stored one with the same key. Raises Refusal."""
        rollout_id = rollout.head.rollout_id
        word, place = await self._rollouts.add(rollout_id, turn, _parent(rollout.turns, plan))
        if word == "unknown":
            raise unknown(rollout_id)
        if word == "closed":
            raise closed(rollout_id)
        if word == "changed":
            raise parent_lost(rollout_id)
        if word == "ok" and place == len(rollout.turns):
            self._metrics.resyncs.inc(plan.added.resynced)
            self._metrics.rollouts.labels("forked").inc(plan.forks)
            return [*rollout.turns, turn], place
        return (await self._load(rollout_id)).turns, place  # another call of this rollout was faster

    async def _plan(
        self, call: ChatCall, taken: Taken, sampling: SamplingParams, until: float, turns: Sequence[Turn]
    ) -> Plan:
        """Plan the next turn. Raises Refusal, RequestError, ModelError."""
        plan = partial(
            plan_turn,
            turns,
            taken.messages,
            call.tools,
            template_kwargs=call.template_kwargs,
            sampling=sampling,
            renderer=self._renderer,
            response_mask=call.response_mask,
            images=taken.refs,
            read_as=call.tool_choice.unusual(call.tools),
        )
        return await self.beside(plan, until, "rendering the prompt")

    async def _plan_tokens(
        self, call: TokenCall, sampling: SamplingParams, until: float, turns: Sequence[Turn]
    ) -> Plan:
        """Raises Refusal, RequestError."""
        plan = partial(plan_tokens, turns, call.token_ids, sampling=sampling, placeholders=self._renderer.placeholders)
        return await self.beside(plan, until, "comparing the prompt with earlier turns")

    async def beside(self, work: Callable[[], T], until: float, what: str) -> T:
        """Run it off the event loop. Raises Refusal (504), and what it raises."""
        left = max(0.0, until - time.monotonic())
        try:
            async with asyncio.timeout(left):
                return await self._rendering.run(work, timeout_s=left, what=what)
        except (TimeoutError, DeadlineExceeded) as error:
            limit_s = self._config.gateway.request_timeout_s
            was = "the prompt to be rendered" if what.startswith("rendering") else what
            message = f"no answer within {limit_s:g} s (gateway.request_timeout_s): waited for {was}"
            raise Refusal(504, message) from error

    def _job(self, request: Asked, name: str, sampling: SamplingParams, **fields: Any) -> DecodeJob:
        gateway = self._config.gateway
        return DecodeJob(
            run=self._config.run,
            job_id=tagged(self._config.run, name),
            sampling=sampling,
            deadline_s=gateway.request_timeout_s,
            adapter=request.model if request.model in self._config.worker.adapters else "",
            seeded=sampling.seed != self._config.sampling.seed,
            stream_every=gateway.stream_tokens if request.stream else 0,
            **{"reply_to": self._name, **fields},
        )

    def _message(self, request: Asked, result: SequenceResult, key: str) -> Message:
        if not isinstance(request, ChatCall):
            return assistant_message(Parsed(result.text), key)
        kwargs, choice = request.template_kwargs, request.tool_choice
        return self._reader.message(result, key, tools=request.tools, choice=choice, template_kwargs=kwargs)


def _parent(turns: Sequence[Turn], plan: Plan) -> Turn | None:
    """The turn that the next one follows."""
    return turns[plan.parent] if plan.parent >= 0 else None


def _answer(request: Asked, turns: Sequence[Turn], place: int, *, resynced: bool) -> Answer:
    turn = turns[place]
    prompt = known_token_ids(path_to(turns, turn.parent)) + list(turn.added_token_ids)
    result = msgspec.structs.replace(turn.result, prompt_token_ids=TokenArray(prompt))
    rollout = {"id": request.rollout_id, "turn": place, "parent": turn.parent, "resynced": resynced}
    return Answer(request.model, [result], [turn.message], rollout)


def _place_of(turns: Sequence[Turn], key: str) -> int | None:
    return next((place for place, turn in enumerate(turns) if turn.key == key), None)
