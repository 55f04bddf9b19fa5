"""What one vLLM request tells the guard, inside `SamplingParams.extra_args`; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

EXTRA = "sluice_guard"
"""Our key in `extra_args`; not for clients of a server."""

ADDITIONAL = "sluice_repeat_terminate"
"""Our key in vLLM's `additional_config`: `GuardRules.plain()`."""

_Natural = Annotated[int, msgspec.Meta(ge=0)]


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
