"""One call of a rollout as its next turn: which turn it follows, which tokens are new, and its key.

- Sampled ids of earlier turns are kept as they are; only what the messages add is made into tokens.
- The key is the call's: the same messages, tools and sampling are the same turn, whoever asks again.
- A mask that a caller sends is a claim about the added tokens; one that does not fit is refused, never mended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pipeline.prompts.turn_tokens import Added, Renderer, TemplateDrift
from pipeline.queue.rollouts import Turn
from pipeline.wire.messages import Message, SamplingParams, SequenceResult
from pipeline.wire.tokens import TokenArray
from producers.gateway.history import after, digest, digests, goes_on_from
from producers.gateway.refusals import Refusal
from producers.gateway.trajectory import known_token_ids, path_to


@dataclass(frozen=True, slots=True)
class Plan:
    """A turn that is to be decoded."""

    key: str
    parent: int  # its place; -1: none
    depth: int  # turns before it on its path
    known: list[int]  # token ids up to the parent's last one
    added: Added
    before: str  # digest of the tools and the messages that were sent
    forks: bool = False  # other turns of the rollout are not on its path

    @property
    def prompt_token_ids(self) -> list[int]:
        """What the model is given."""
        return self.known + self.added.token_ids

    def turn(self, result: SequenceResult, message: Message) -> Turn:
        """The turn with its answer, to be stored."""
        return Turn(
            key=self.key,
            parent=self.parent,
            history=after(self.before, message),
            added_token_ids=TokenArray(self.added.token_ids),
            result=msgspec.structs.replace(result, prompt_token_ids=TokenArray()),
            message=message,
        )


def plan_turn(
    turns: Sequence[Turn],
    messages: Sequence[Message],
    tools: Sequence[Any],
    *,
    sampling: SamplingParams,
    renderer: Renderer,
    response_mask: Sequence[int] | None = None,
) -> Plan:
    """Raises Refusal (400) for a mask or a template that does not fit, RequestError, ModelError."""
    with_tools = replace(renderer, options=replace(renderer.options, tools=tools))
    before = digests(messages, tools)[-1]
    found = goes_on_from(turns, messages, tools)
    path = path_to(turns, found.turn) if found else []
    known = known_token_ids(path)
    try:
        added = with_tools.added(messages, at=found.at, known=known) if found else Added(with_tools.prompt(messages))
    except TemplateDrift as error:
        raise Refusal(400, f"mask_error: {error}", "messages", code="mask_error") from error
    check_mask(response_mask, len(added.token_ids), first=found is None)
    return Plan(
        key=digest([before, msgspec.to_builtins(sampling)]),
        parent=found.turn if found else -1,
        depth=len(path),
        known=known,
        added=added,
        before=before,
        forks=len(turns) > 0 and (found is None or any(turn.parent == found.turn for turn in turns)),
    )


def check_mask(mask: Sequence[int] | None, num_added: int, *, first: bool) -> None:
    """Raises Refusal (400) unless the mask is left out or has a 0 for each added token."""
    if mask is None or (first and not mask):
        return
    if len(mask) != num_added:
        what = "the prompt" if first else "what this call adds to the rollout"
        raise _mask_error(f"response_mask has {len(mask)} values, and {what} has {num_added} tokens")
    if any(mask):
        at = list(mask).index(1)
        raise _mask_error(f"response_mask[{at}] is 1, and these tokens were not sampled; send 0 for each, or null")


def _mask_error(message: str) -> Refusal:
    return Refusal(400, f"mask_error: {message}", "response_mask", code="mask_error")
