"""How far the evaluation of a run is: one JSON value in the broker and best.json, written by its one evaluator.

The trainer reads from it which versions it may not delete; whatever shows a run, reads the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from sluice.pipeline.errors import MessageError
from sluice.pipeline.wire.codec import Unreadable, read_json
from sluice.pipeline.wire.keys import Keys

BEST = "best.json"
"""In the run's directory: the version that is kept as the best one."""
_unreadable = Unreadable()  # reported by this process


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluated versions so far."""

    running: int | None = None  # the version under evaluation, which stays on disk
    answered: int = 0  # sequences of it
    asked: int = 0  # sequences of it, answered or not
    evaluations: int = 0  # that have ended
    version: int | None = None  # of the last one that has ended
    values: dict[str, float] = {}  # its metrics, eval/…
    metric: str = ""  # decides which version is best
    best: int | None = None  # the best version
    best_value: float | None = None
    keeps_best: bool = False  # it stays on disk
    since_best: int = 0  # evaluations after it that were no better
    stops: str = ""  # why the trainer is to end; empty: it isn't

    @property
    def held(self) -> frozenset[int]:
        """Versions that no retention may delete."""
        kept = (self.running, self.best if self.keeps_best else None)
        return frozenset(version for version in kept if version is not None)


def read_evaluation(raw: bytes | None) -> Evaluation:
    """Raises MessageError."""
    return Evaluation() if raw is None else read_json(raw, Evaluation, "it")


async def evaluation_of(client: Redis, keys: Keys) -> Evaluation:
    """An unreadable one counts as none."""
    try:
        return read_evaluation(await cast("Awaitable[bytes | None]", client.get(keys.evaluation)))
    except (MessageError, ResponseError) as error:  # ResponseError: the key has another type
        _unreadable.skip(keys.evaluation, "", f"{error}; the next evaluation repairs it")
        return Evaluation()


async def store_evaluation(client: Redis, keys: Keys, now: Evaluation) -> None:
    """Only the evaluator calls this."""
    await cast("Awaitable[Any]", client.set(keys.evaluation, msgspec.json.encode(now)))


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """best.json in the run's directory."""

    schema_version: int = 1
    version: int
    metric: str
    value: float
    path: str  # of the version, while eval.keep_best holds it


def best_of(run_dir: Path) -> int | None:
    """The version that best.json names; None if there is none, or none that can be read."""
    try:
        return read_json((run_dir / BEST).read_bytes(), Best, "it").version
    except (OSError, MessageError):
        return None


def headline(values: Mapping[str, float]) -> list[str]:
    """The metrics that a view shows first."""
    shown = ("eval/pass@", "eval/reward", "eval/f1", "eval/precision", "eval/recall")
    return [key for key in values if key.startswith(shown) and not key.endswith(("_low", "_high"))]
