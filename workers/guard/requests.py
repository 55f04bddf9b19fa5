"""What one vLLM request tells the guard in `SamplingParams.extra_args`, and the triggers not yet collected."""

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
    """Set on requests from our own backend."""

    key: str  # key for collecting the trigger afterwards
    forced: _Natural  # id that ends it: reserved, so it can be told from an end that the model chose
    offset: _Natural = 0  # tokens at the end of the prompt that were generated before this request
    probe: dict[str, Any] | None = None  # replacement rules, `GuardRules.plain()`; at start-up only

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> GuardArguments | None:
        """None if there are none. Raises msgspec.ValidationError."""
        found = (extra_args or {}).get(EXTRA)
        return None if found is None else msgspec.convert(found, cls)

    def plain(self) -> dict[str, Any]:
        """As `extra_args` take it."""
        return {EXTRA: msgspec.to_builtins(self)}


class GuardRequests:
    """One per loaded processor; `eos` ends a request that has neither arguments nor its own EOS."""

    def __init__(self, rules: GuardRules, eos: int = 0) -> None:
        self.rules = rules
        self.cost = GuardCost()
        self._eos = eos
        self._noted: dict[str, RepeatTrigger] = {}
        self._starting = True

    def begin(self, sampling: Any) -> tuple[RepeatGuard, GuardArguments]:
        """A guard for a new request with these `vllm.SamplingParams`."""
        asked = GuardArguments.of(sampling.extra_args)
        if asked is None:
            primary = sampling.eos_token_id
            return self.rules.guard(), GuardArguments(key="", forced=self._eos if primary is None else primary)
        if asked.probe is not None and self._starting:
            return GuardRules.from_plain(asked.probe).guard(), asked
        return self.rules.guard(), asked

    def started(self) -> None:
        """From now on, requests can't bring their own rules."""
        self._starting = False

    def note(self, key: str, trigger: RepeatTrigger) -> None:
        """Keep the trigger until it is collected; for requests without a key nobody collects it."""
        if not key:
            return
        self._noted.pop(key, None)
        if len(self._noted) >= _MAX_NOTED:
            del self._noted[next(iter(self._noted))]
        self._noted[key] = trigger

    def take(self, key: str) -> RepeatTrigger | None:
        """Why the request of this key was ended, or None if the model chose its last token."""
        return self._noted.pop(key, None)
