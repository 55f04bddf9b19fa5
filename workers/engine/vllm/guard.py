"""The repeat guard in vLLM's core, seen from our side: request arguments, and why the core ended a request.

- A loop ends with a reserved id, so it can be told from an end of sequence that the model chose; if possible, an id the
  tokenizer never writes.
- The model may still choose the reserved id itself: then the core has no trigger, and the sequence continues.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sluice.pipeline.errors import GuardRefused, RequestError
from sluice.workers.engine.contracts import GuardTrial
from sluice.workers.engine.running import RunningSequence
from sluice.workers.guard.repeat import RepeatTrigger
from sluice.workers.guard.requests import GuardArguments
from sluice.workers.guard.rules import GuardRules
from sluice.workers.guard.watch import GuardCost

Call = Callable[..., Awaitable[list[Any]]]
"""`await call(method, *args)`: the answer of every worker of the core."""


class CoreGuard:
    """One per engine with the guard enabled."""

    def __init__(self, rules: GuardRules, tokenizer: Any, vocab_size: int, call: Call) -> None:
        self.rules = rules
        self._call = call
        self._preferred = _reserved(tokenizer, vocab_size)

    def arguments(self, sequence: RunningSequence, request_id: str) -> GuardArguments:
        """For the rest of the sequence. Raises RequestError if no id is left to reserve."""
        ends, request = set(sequence.end_token_ids), sequence.request
        free = [token for token in self._preferred if token not in ends]
        unlikely = (token for token in free if token not in request.allowed_token_ids)
        reserved = next(unlikely, free[0] if free else None)
        if reserved is None:
            raise RequestError(f"{request.seq_key}: every id of the vocabulary ends it; none is left for the guard")
        probe = request.probe_guard
        return GuardArguments(
            key=request_id,
            forced=reserved,
            offset=len(sequence.tokens),
            probe=None if probe is None else probe.plain(),
        )

    async def why(self, request_id: str) -> RepeatTrigger | None:
        """Why the core forced the reserved id; None if it didn't (the model chose it)."""
        for answer in await self._call("sluice_guard_take", request_id):
            if answer is not None:
                return RepeatTrigger(*answer)
        return None

    async def attempt(self, token_ids: Sequence[int]) -> GuardTrial:
        """See `contracts.Backend.try_guard`; every worker must have loaded it, with the rules it was sent."""
        answers = await self._call("sluice_guard_try", list(token_ids))
        if any(answer != answers[0] or answer is None for answer in answers):
            raise GuardRefused(f"vLLM's workers do not share one repeat guard: {answers!r:.300}")
        rules, trigger = GuardRules.from_plain(answers[0]["rules"]), answers[0]["trigger"]
        if rules != self.rules:  # its object keys were proved on the tokenizer in this process, not in the core
            raise GuardRefused(f"vLLM's core has rules other than those it was sent: {rules!r:.300}")
        return GuardTrial(rules, None if trigger is None else RepeatTrigger(*trigger))

    async def cost(self) -> GuardCost:
        """Over the first worker's steps since the last call."""
        return GuardCost(**(await self._call("sluice_guard_cost"))[0])


def _reserved(tokenizer: Any, vocab_size: int) -> list[int]:
    """Ids to reserve, least likely to be sampled first: beyond the tokenizer, padding, the last ones."""
    size = len(tokenizer)
    pad = [tokenizer.pad_token_id] if tokenizer.pad_token_id is not None else []
    found = [*range(vocab_size - 1, size - 1, -1), *pad, *range(min(size, vocab_size) - 1, -1, -1)]
    return list(dict.fromkeys(token for token in found if 0 <= token < vocab_size))
