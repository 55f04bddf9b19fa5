"""The conversation of one rollout, and which tokens each call adds to it.

    known: |── prompt ──|── reply ──|    next call: |── known ──|── added: response_mask 0 ──|── reply ──| …

- `last_len` is the reply's own len(prompt_token_ids) + len(token_ids); appending messages never moves it.
- If messages were only appended, the added tokens follow the same rule as in the gateway
  (sluice.pipeline.prompts.turn_tokens).
- If earlier messages were changed or removed, no tokens can be identified as new: the call is refused.
- An image is one placeholder in the local rendering, and many tokens in the trainer's prompt. So a call that adds one
  sends no mask, and only the known part of its prompt is compared.
- Every reply reports its prompt, which must be the known ids plus the added ones, or the local rendering (a trainer
  that re-tokenises); anything else is drift: an error, or counted and accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

from sluice.pipeline.errors import ModelError, RequestError
from sluice.pipeline.prompts.admission import image_parts
from sluice.pipeline.prompts.turn_tokens import Added, Renderer, TemplateDrift
from sluice.pipeline.wire.messages import Message
from sluice.producers.agents.tokenizers import Tokenizers
from sluice.producers.agents.trainer_client import Trainer
from sluice.producers.http.schemas import (
    CompletionsRequest,
    CompletionsResponse,
    JsonObject,
    RolloutError,
    SamplingParams,
)
from sluice.producers.http.schemas import Message as ChatMessage

TRUNCATED = "Invalid conversation state (possible context truncation)"


class RolloutSession:
    """One rollout's messages and token counts; one call at a time."""

    def __init__(
        self,
        rollout_id: str,
        messages: Sequence[Message],
        *,
        renderer: Renderer,
        tokenizers: Tokenizers,
        trainer: Trainer,
        tools: Sequence[JsonObject] = (),
        drift: Literal["error", "warn"] = "error",
    ) -> None:
        self.messages = list(messages)
        self.last_len = 0  # tokens of the context after the last reply
        self.num_resyncs, self.num_drifts = 0, 0
        self._rollout_id, self._tools, self._drift = rollout_id, list(tools), drift
        self._renderer, self._tokenizers, self._trainer = renderer, tokenizers, trainer
        self._known: list[int] = []
        self._rendered: list[int] = []  # `_known` with one placeholder per image
        self._sent: list[Message] = []  # the messages of `_known`, including the reply

    async def prepare(self) -> PreparedCall:
        """The tokens of the next call. Raises RolloutError mask_error, tokenizer_error, validation_error."""
        messages = copy.deepcopy(self.messages)
        try:
            return await self._tokenizers.render(lambda: self._prepared(messages))
        except ModelError as error:
            raise RolloutError("tokenizer_error", str(error)) from error
        except RequestError as error:
            raise RolloutError("validation_error", str(error)) from error

    async def call_llm(self, sampling: SamplingParams, call: PreparedCall, *, until: float) -> CompletionsResponse:
        """Request the next turn and record its tokens; its message isn't appended. Raises RolloutError."""
        options = sampling.model_dump()
        request = CompletionsRequest.model_validate(
            options
            | {
                "rollout_id": self._rollout_id,
                "messages": [ChatMessage.model_validate(one) for one in call.messages],
                "response_mask": call.response_mask,
                "tools": self._tools or None,
            }
        )
        reply = await self._trainer.complete(request, until=until)
        await self.take(call, reply)
        return reply

    async def take(self, call: PreparedCall, reply: CompletionsResponse) -> None:
        """Record the tokens of a reply. Raises RolloutError mask_error for drift."""
        await self._check(call, reply.prompt_token_ids)
        self.num_resyncs += call.resynced
        self._known = [*reply.prompt_token_ids, *reply.token_ids]
        self._rendered = [*call.token_ids, *reply.token_ids] if call.num_images else self._known
        self._sent = [*call.messages, reply.choices[0].message.plain()]
        self.last_len = len(self._known)

    def _prepared(self, messages: list[Message]) -> PreparedCall:
        if not self._sent:
            prompt = self._renderer.prompt(messages)
            expected = None if image_parts(messages) else prompt
            return PreparedCall(messages, prompt, num_tokens=len(prompt), expected=expected, first=True)
        if messages[: len(self._sent)] == self._sent:
            try:
                added = self._renderer.added(messages, at=len(self._sent) - 1, known=self._rendered)
            except TemplateDrift as error:
                return self._without_suffix(messages, error)
            new_images = len(image_parts(messages[len(self._sent) :]))
            prompt = [*self._rendered, *added.token_ids]
            expected = None if new_images else [*self._known, *added.token_ids]
            return self._next_call(messages, prompt, added, expected=expected, has_mask=not new_images)
        change = self._by_length(self._renderer.prompt(messages))
        raise RolloutError(
            "mask_error", f"earlier messages were changed ({len(change)} tokens longer now); only append to them"
        )

    def _without_suffix(self, messages: list[Message], error: TemplateDrift) -> PreparedCall:
        """Drift found before the call: the template yields no suffix. Lengths decide for other systems' trainers."""
        if self._drift == "error":
            raise RolloutError("mask_error", str(error)) from error
        self.num_drifts += 1
        whole = self._renderer.prompt(messages)
        expected = None if image_parts(messages) else whole
        has_mask = not image_parts(messages[len(self._sent) :])
        return self._next_call(messages, whole, Added(self._by_length(whole)), expected=expected, has_mask=has_mask)

    def _next_call(
        self, messages: list[Message], prompt: list[int], added: Added, *, expected: list[int] | None, has_mask: bool
    ) -> PreparedCall:
        num_tokens = len(self._known) + len(added.token_ids)
        return PreparedCall(messages, prompt, num_tokens=num_tokens, expected=expected, added=added, has_mask=has_mask)

    def _by_length(self, whole: list[int]) -> list[int]:
        """Tokens of a rendering beyond the last reply. Raises RolloutError if the context became shorter."""
        before = len(self._rendered)  # not last_len, which counts images as they were expanded
        if len(whole) < before:
            raise RolloutError("mask_error", f"{TRUNCATED}: {len(whole)} tokens now, {before} after the last reply")
        return whole[before:]

    async def _check(self, call: PreparedCall, seen: list[int]) -> None:
        if seen == call.expected or (call.expected is None and seen[: len(self._known)] == self._known):
            return
        if call.resynced and seen == await self._tokenizers.render(lambda: self._renderer.prompt(call.messages)):
            return
        self.num_drifts += 1
        if self._drift == "error":
            ours = call.token_ids if call.expected is None else call.expected
            at = next((at for at, (a, b) in enumerate(zip(seen, ours, strict=False)) if a != b), None)
            at = min(len(seen), len(ours)) if at is None else at
            raise RolloutError(
                "mask_error",
                f"template drift: the trainer's prompt has {len(seen)} tokens, ours {len(ours)}, and they "
                f"differ from token {at} on; use the same chat template and tools on both sides, or "
                "rollout_server.template_drift=warn for another system's trainer",
            )


class PreparedCall:
    """The messages of a call, its expected prompt ids, and which of them are new.

    Each image is one token in `token_ids`; `num_tokens` counts images of earlier calls as expanded.
    `expected` is the whole prompt as the trainer reports it; None: an image's tokens aren't known here.
    """

    def __init__(
        self,
        messages: list[Message],
        token_ids: list[int],
        *,
        num_tokens: int,
        expected: list[int] | None,
        added: Added | None = None,
        first: bool = False,
        has_mask: bool = True,
    ) -> None:
        self.messages, self.token_ids, self.num_tokens = messages, token_ids, num_tokens
        self.expected = expected
        self.num_images = len(image_parts(messages))
        new = 0 if first or added is None or not has_mask else len(added.token_ids)
        self.response_mask = [0] * new or None
        self.resynced = added is not None and added.resynced
