"""One rollout, from the queue to its answer.

- The loop: call the model, append its message, run the tools it asks for, append their results, repeat.
- Every failure is an answer: ERROR with a category. `run` raises nothing but its own cancellation.
- With an environment, a message without tool calls is an action in it; its observation comes next, until it is done.
- Waits are bounded (see the package) and named: if one times out, the answer says what it waited for.
- At the end the trainer is notified (`finish`), in both protocols, before the answer is returned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from sluice.pipeline.logs import get_logger
from sluice.pipeline.prompts.chat_template import ChatTemplateOptions
from sluice.pipeline.prompts.turn_tokens import Renderer
from sluice.producers.agents.environment import EnvironmentFailed, OpenEnvironment, Rollout, current
from sluice.producers.agents.session import PreparedCall, RolloutSession
from sluice.producers.agents.state import AppState
from sluice.producers.agents.tools import ToolBox
from sluice.producers.agents.tools.image import with_digests
from sluice.producers.agents.trainer_client import Trainer, TrainerClient
from sluice.producers.http.schemas import (
    CompletionsResponse,
    FinishReason,
    RolloutError,
    RolloutMetrics,
    RolloutRequest,
    RolloutResponse,
    RolloutStatus,
)
from sluice.producers.http.schemas import Message as ChatMessage

Made = TypeVar("Made")
_FINISH_S = 30.0  # for the trainer to close a rollout that completed
_LEAVE_S = 10.0  # how long a cancelled step may take to end


class Execution:
    """A rollout that runs once."""

    def __init__(self, request: RolloutRequest, state: AppState, trainer: Trainer | None = None) -> None:
        self.request, self.is_running = request, False
        self.trainer = trainer or TrainerClient(
            state.http,
            request,
            max_bytes=state.max_bytes,
            retries=state.retries,
            on_retry=lambda reason: state.counters.retries.labels(reason).inc(),
        )
        self.until = 0.0  # the deadline, on the clock of time.monotonic()
        self._state, self._metrics = state, RolloutMetrics()
        self._session: RolloutSession | None = None
        self._final_messages: list[dict[str, Any]] = []
        self._environment: OpenEnvironment | None = None
        self._waits_for, self._is_over = "a free slot", False
        self._ended: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

    def end(self, why: str, final_status: str = "ERROR") -> bool:
        """End it early, as an error; False if it has already ended."""
        if self._is_over or self._ended.done():
            return False
        self._ended.set_result((why, final_status))
        return True

    async def run(self) -> RolloutResponse:
        """Run it and return its answer."""
        began, final_status = time.monotonic(), "ERROR"
        try:
            answer, final_status = self._completed(await self._in_line()), "COMPLETED"
        except RolloutError as error:
            answer = self._failed(error)
            if self._ended.done():
                final_status = self._ended.result()[1]
        except Exception as error:  # our own bugs are answers too
            get_logger().exception("rollout failed", rollout=self.request.rollout_id)
            answer = self._failed(RolloutError("internal_error", f"internal error ({type(error).__name__})"))
        self._is_over = True
        answer.metrics.total_latency_ms = 1000 * (time.monotonic() - began)
        await self._tell(final_status, answer)
        self._state.counters.ended(answer)
        return answer

    async def _in_line(self) -> FinishReason:
        line, deadline_s = self._state.line, self._state.settings.deadline_s
        await self._bounded(line.start(), deadline_s)
        try:
            self.is_running, self.until = True, time.monotonic() + deadline_s
            reason = await self._bounded(self._whole_rollout(), deadline_s)
            if self._ended.done():  # it was ended at the same moment
                raise RolloutError("internal_error", self._ended.result()[0])
            return reason
        finally:
            line.end()

    async def _bounded(self, work: Coroutine[Any, Any, Made], seconds: float) -> Made:
        """The result of the work. Raises RolloutError if the rollout is ended or it times out."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_LEAVE_S)
        if task.done() and not task.cancelled():
            return task.result()
        if self._ended.done():
            raise RolloutError("internal_error", self._ended.result()[0])
        if self.trainer.held_up is not None:
            raise self.trainer.held_up
        raise RolloutError(
            "timeout", f"did not end within {seconds:g} s (rollout_server.deadline_s), waiting for {self._waits_for}"
        )

    async def _whole_rollout(self) -> FinishReason:
        reason = await self._rollout()
        assert self._session is not None, "a rollout ends in its session"
        self._waits_for = "the digests of its images"
        self._final_messages = await asyncio.to_thread(with_digests, self._session.messages)
        return reason

    async def _rollout(self) -> FinishReason:
        request = self.request
        most_replies, most_rounds = request.turn_limits()
        async with AsyncExitStack() as scope:
            tools = await self._tools(scope)
            messages = await self._begin(scope)
            session = self._session = await self._open_session(tools, messages)
            for turn in range(1, most_replies + 1):
                self._waits_for = f"the prompt of turn {turn}"
                call = await session.prepare()
                left = request.max_tokens_total - call.num_tokens
                if left < 1:
                    return "max_tokens"
                self._waits_for = f"the trainer's reply of turn {turn}"
                reply = (await self._ask(session, call, left)).choices[0]
                session.messages.append(reply.message.plain())
                if not reply.message.tool_calls and await self._is_done(session, reply.message):
                    return "max_tokens" if reply.finish_reason == "length" else "stop"
                if session.last_len >= request.max_tokens_total:
                    return "max_tokens"
                if turn == most_replies or turn > most_rounds:
                    break
                if reply.message.tool_calls:
                    await self._use_tools(tools, session, reply.message)
        return "max_turns"

    async def _tools(self, scope: AsyncExitStack) -> ToolBox:
        url, state = self.request.tool_server_url, self._state
        if url is None:
            return state.tools
        from sluice.producers.agents.tools.mcp import mcp_tools

        self._waits_for = "the tool server"
        try:
            found = await scope.enter_async_context(
                mcp_tools(url, state.hosts, timeout_s=state.settings.tool_timeout_s)
            )
        except Exception as error:  # its client raises all kinds of errors, including groups
            raise RolloutError("tool_error", f"the tool server at {url} failed ({error})") from error
        return state.tools.plus(found, "server")

    async def _begin(self, scope: AsyncExitStack) -> list[dict[str, Any]]:
        """The first messages: the request's, or those that its environment makes of them."""
        request, state = self.request, self._state
        messages = [one.plain() for one in request.messages]
        rollout = Rollout(request.rollout_id)
        current.set(rollout)
        if state.environments is None:
            return messages
        self._waits_for = "the environment's reset"
        row = {"rollout_id": request.rollout_id, "messages": messages, "metadata": request.metadata}
        try:
            self._environment = await scope.enter_async_context(state.environments.opened(rollout))
            return await self._environment.reset(row)
        except EnvironmentFailed as error:
            raise RolloutError("tool_error", f"the environment: {error}") from error

    async def _is_done(self, session: RolloutSession, message: ChatMessage) -> bool:
        """Whether the rollout ends with this message; if not, what it led to comes next."""
        if self._environment is None:
            return True
        self._waits_for, began = "the environment's step", time.monotonic()
        try:
            step = await self._environment.step(message.plain())
            session.messages.extend([] if step.done else step.messages)
        except EnvironmentFailed as error:
            raise RolloutError("tool_error", f"the environment: {error}") from error
        finally:
            self._metrics.tool_latency_ms += 1000 * (time.monotonic() - began)
        return step.done

    async def _open_session(self, tools: ToolBox, messages: list[dict[str, Any]]) -> RolloutSession:
        request, state = self.request, self._state
        self._waits_for = f"the tokenizer {request.tokenizer_name}"
        loaded = await state.tokenizers.get(request.tokenizer_name, request.tokenizer_revision)
        schemas = tools.schemas()
        options = ChatTemplateOptions(tools=schemas if state.settings.template_tools else ())
        return RolloutSession(
            request.rollout_id,
            messages,
            renderer=Renderer(loaded.tokenizer, loaded.terminators, options, placeholders=loaded.placeholders),
            tokenizers=state.tokenizers,
            trainer=self.trainer,
            tools=schemas,
            drift=state.settings.template_drift,
        )

    async def _ask(self, session: RolloutSession, call: PreparedCall, left: int) -> CompletionsResponse:
        sampling, metrics, began = self.request.sampling_params, self._metrics, time.monotonic()
        sampling = sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, left)})
        try:
            reply = await session.call_llm(sampling, call, until=self.until)
        finally:
            took_s = time.monotonic() - began
            metrics.llm_latency_ms += 1000 * took_s
            self._state.counters.llm_s.observe(took_s)
        metrics.num_llm_calls += 1
        metrics.prompt_tokens += len(reply.prompt_token_ids)
        metrics.response_tokens += len(reply.token_ids)
        metrics.max_context_tokens = max(metrics.max_context_tokens, session.last_len)
        return reply

    async def _use_tools(self, tools: ToolBox, session: RolloutSession, message: ChatMessage) -> None:
        calls, began = [call.model_dump(mode="json") for call in message.tool_calls or ()], time.monotonic()
        self._waits_for = "tools: " + ", ".join(call["function"]["name"] for call in calls)[:200]
        try:
            session.messages.extend(await tools.run(calls, session.messages))
        finally:
            took_s = time.monotonic() - began
            self._metrics.tool_latency_ms += 1000 * took_s
            self._metrics.num_tool_calls += len(calls)
            self._state.counters.tool_s.observe(took_s)
            self._state.counters.tool_calls.inc(len(calls))

    def _completed(self, reason: FinishReason) -> RolloutResponse:
        return self._answer(
            RolloutStatus.COMPLETED,
            finish_reason=reason,
            final_messages=[ChatMessage.model_validate(one) for one in self._final_messages],
            reward=None if self._environment is None else self._environment.reward,
            num_turns=self._metrics.num_llm_calls,
        )

    def _failed(self, error: RolloutError) -> RolloutResponse:
        get_logger().warning("rollout error", rollout=self.request.rollout_id, category=error.category, why=str(error))
        why: dict[str, Any] = {"error_category": error.category}
        if error.http_status is not None:
            why["http_status"] = error.http_status
        return self._answer(RolloutStatus.ERROR, finish_reason="error", error_message=str(error), extra_fields=why)

    def _answer(self, status: RolloutStatus, **fields: Any) -> RolloutResponse:
        answer = RolloutResponse(rollout_id=self.request.rollout_id, status=status, metrics=self._metrics, **fields)
        if self._session is not None:
            counted = {"resyncs": self._session.num_resyncs, "template_drift": self._session.num_drifts}
            answer.extra_fields.update({name: count for name, count in counted.items() if count})
            self._state.counters.resyncs.inc(counted["resyncs"])
            self._state.counters.drifts.inc(counted["template_drift"])
        return answer

    async def _tell(self, final_status: str, answer: RolloutResponse) -> None:
        """Close the rollout at the trainer; if that fails, the answer says so and is otherwise unchanged."""
        now, ending_s = time.monotonic(), self._state.retries.ending_s
        left_s = min(self.until - now, _FINISH_S) if final_status == "COMPLETED" else 0.0
        try:
            until = now + max(left_s, ending_s)
            known = await self.trainer.finish(
                final_status, until=until, reward=answer.reward, num_turns=answer.num_turns
            )
            outcome = "told" if known else "not_offered"
        except RolloutError as error:
            outcome = "failed"
            answer.extra_fields["finish_error"] = str(error)
            get_logger().warning(
                "could not tell the trainer that a rollout ended", rollout=answer.rollout_id, why=str(error)
            )
        self._state.counters.finishes.labels(outcome).inc()
