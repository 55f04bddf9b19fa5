"""Whether a run moves, judged from two snapshots; `sluice status --why`.

- It is stuck if a stall blocks it that doesn't end by itself, or if nothing moved, there is a stall and no process is
  working.
- A run that was asked to stop, or that reached trainer.max_versions, isn't stuck; one whose supervisor was killed needs
  a new start.
- A working process (a step, a long sequence) counts as movement to come.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.connection import BrokerSilent
from sluice.pipeline.config import Config
from sluice.pipeline.errors import BrokerError
from sluice.pipeline.status.inspection import inspect
from sluice.pipeline.status.run_end import run_directory
from sluice.pipeline.status.snapshot import Process, Snapshot, snapshot
from sluice.pipeline.wire.keys import Keys

APART_S = 1.0  # between the two snapshots
_ANSWER_S = 3.0  # a reachable broker answers sooner
_DEADLINE_S = 15.0
_COUNTS = ("tokens", "enqueued", "committed", "accepted", "trained", "stepped", "dead", "dropped")


VerdictState = Literal["complete", "idle", "moving", "working", "waiting", "stopped", "killed", "stalled", "failed"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The headline of `sluice status --why`."""

    state: VerdictState
    moved: dict[str, int] = {}  # counts that changed between the two snapshots
    over_s: float = 0.0
    busy: str | None = None  # a working process

    @property
    def is_healthy(self) -> bool:
        """Whether nothing needs to be done."""
        return self.state not in ("stalled", "failed", "killed")


def verdict(before: Snapshot, now: Snapshot) -> Verdict:
    """`now` is an inspection, with its stalls."""
    over_s = max(0.0, now.at - before.at)
    moved = {name: count for name in _COUNTS if (count := int(getattr(now, name) - getattr(before, name))) > 0}
    if now.latest_version != before.latest_version:
        moved["versions"] = max(1, (now.latest_version or 0) - (before.latest_version or 0))
    busy = next((row.name for row in now.processes if _works(row)), None)
    return Verdict(state=_state(now, moved, busy), moved=moved, over_s=round(over_s, 3), busy=busy)


def _state(now: Snapshot, moved: dict[str, int], busy: str | None) -> VerdictState:
    if now.complete:
        return "complete"
    if not (now.enqueued or now.processes):
        return "idle"
    if now.end is not None and now.end.state in ("failed", "killed"):
        return now.end.state
    if now.is_stopped:
        return "stopped"
    if any(stall.blocks for stall in now.stalls) or (now.stalls and not moved and not busy):
        return "stalled"
    return "moving" if moved else "working" if busy else "waiting"


def _works(row: Process) -> bool:
    return row.is_alive and row.wait is None and not row.is_onlooker


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The result of both snapshots."""

    now: Snapshot
    verdict: Verdict


def look_twice(config: Config, apart_s: float = APART_S) -> Why:
    """Raises BrokerError within seconds, with the remedy, if the broker doesn't answer."""
    settings = msgspec.structs.replace(
        config.broker, retry_for_s=_ANSWER_S, socket_timeout_s=_ANSWER_S, connect_timeout_s=_ANSWER_S
    )
    hasty = msgspec.structs.replace(config, broker=settings)
    try:
        connection.ping(hasty.broker, config.run)
    except BrokerSilent as error:
        patience = f"{config.broker.retry_for_s:g} s"
        raise BrokerError(
            f"{error}. Every process of the run waits up to {patience} (broker.retry_for_s), and continues once it is "
            "back"
        ) from error
    return asyncio.run(_look_twice(hasty, apart_s))


async def _look_twice(config: Config, apart_s: float) -> Why:
    client, keys = connection.connect(config.broker, config.run), Keys(config.run)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            before = await snapshot(client, keys)
            await asyncio.sleep(0 if before.complete else apart_s)
            now = await inspect(client, keys, config.consumer.count, run_directory(config))
            return Why(now=now, verdict=verdict(before, now))
    except TimeoutError as error:
        raise BrokerError(
            f"the broker is too slow: it did not answer a status query within {_DEADLINE_S:g} s; is its machine "
            "overloaded or swapping?"
        ) from error
    finally:
        await client.aclose()
