"""Which calls of this process wait for a full broker, since when: for its log, its heartbeat and its errors."""

from __future__ import annotations

import time

from redis.exceptions import OutOfMemoryError

from sluice.pipeline.logs import get_logger

REMEDY = (
    "give it more memory (`redis-cli config set maxmemory 4gb`, and in its configuration), or free some "
    "(`sluice dlq drop`, runs that are over); producer.max_in_flight_mb bounds what a run holds"
)
CAUSE = "room in the broker, which is full"
_SAY_EVERY_S = 30.0


class _Room:
    """Of this process."""

    def __init__(self) -> None:
        self.calls: dict[object, float] = {}  # waiting call → since when, Unix s
        self.said = 0.0  # Unix s


_room = _Room()


def is_full(error: Exception) -> bool:
    """Whether the broker refuses for lack of memory; inside a script Redis 6.2 gives that no class of its own."""
    return isinstance(error, OutOfMemoryError) or "OOM " in str(error)


def waits_for_room() -> float | None:
    """Since when (Unix s) calls of this process wait for room; None when none does."""
    return min(_room.calls.values(), default=None)


def note(call: object, *, at_most_s: float) -> None:
    """This call waits for room."""
    now = time.time()
    _room.calls.setdefault(call, now)
    if now - _room.said >= _SAY_EVERY_S:
        _room.said = now
        get_logger().warning("the broker is full; waiting for room", at_most_s=at_most_s, help=REMEDY)


def forget(call: object) -> None:
    """This call does not wait any more."""
    _room.calls.pop(call, None)


def too_long(error: Exception, waited_s: float) -> OutOfMemoryError:
    """What ends the wait."""
    return OutOfMemoryError(f"the broker is full ({error}), and no room came in {waited_s:g} s: {REMEDY}")
