"""What one vLLM request tells the guard in `SamplingParams.extra_args`, and the triggers that wait to be asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from sluice.workers.guard.repeat import RepeatGuard, RepeatTrigger
from sluice.workers.guard.rules import GuardRules
from sluice.workers.guard.watch import GuardCost

EXTRA = "sluice_guard"
"""Our key in `extra_args`; not for clients of a server."""

ADDITIONAL = "sluice_repeat_terminate"
"""Our key in vLLM's `additional_config`: `GuardRules.plain()`."""

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_MAX_NOTED = 4096
"""Triggers that nobody asked for, of requests that were aborted in that very step."""


class GuardArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a request that our own backend sends."""

    key: str  # by which the trigger is asked for afterwards
    forced: _Natural  # id that ends it: reserved for this, so that it is told from an end that the model chose
    offset: _Natural = 0  # tokens at the end of the prompt that were generated before this request
    probe: dict[str, Any] | None = None  # other rules, `GuardRules.plain()`; at start-up only

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> GuardArguments | None:
        """None where there are none. Raises msgspec.ValidationError."""
        found = (extra_args or {}).get(EXTRA)
        return None if found is None else msgspec.convert(found, cls)

    def plain(self) -> dict[str, Any]:
        """As `extra_args` take it."""
        return {EXTRA: msgspec.to_builtins(self)}


class GuardRequests:
    """One for each loaded processor; `eos` ends a request that brings neither arguments nor an EOS of its own."""

    def __init__(self, rules: GuardRules, eos: int = 0) -> None:
        self.rules = rules
        self.cost = GuardCost()
        self._eos = eos
        self._noted: dict[str, RepeatTrigger] = {}
        self._starting = True

    def begin(self, sampling: Any) -> tuple[RepeatGuard, GuardArguments]:
        """A guard for a new request of these `vllm.SamplingParams`."""
        asked = GuardArguments.of(sampling.extra_args)
        if asked is None:
            primary = sampling.eos_token_id
            return self.rules.guard(), GuardArguments(key="", forced=self._eos if primary is None else primary)
        if asked.probe is not None and self._starting:
            return GuardRules.from_plain(asked.probe).guard(), asked
        return self.rules.guard(), asked

    def started(self) -> None:
        """From now on requests cannot bring rules of their own."""
        self._starting = False

    def note(self, key: str, trigger: RepeatTrigger) -> None:
        """Keep it until it is asked for; requests without a key have nobody who asks."""
        if not key:
            return
        self._noted.pop(key, None)
        if len(self._noted) >= _MAX_NOTED:
            del self._noted[next(iter(self._noted))]
        self._noted[key] = trigger

    def take(self, key: str) -> RepeatTrigger | None:
        """Why the request of this key was ended, or None: its last token was the model's own choice."""
        return self._noted.pop(key, None)
