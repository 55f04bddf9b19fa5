"""The guard's signal as results carry it."""

from __future__ import annotations

from typing import Any

from workers.guard.repeat import RepeatTrigger


def triggers(trigger: RepeatTrigger | None, *, active: bool) -> dict[str, Any]:
    """`repeat_terminate` 0|1, `active` 0|1 (a guard watched the sequence); with 1 also `rule` and `at_token`."""
    why = {} if trigger is None else {"rule": trigger.rule, "at_token": trigger.at_token}
    return {"repeat_terminate": int(trigger is not None), "active": int(active), **why}
