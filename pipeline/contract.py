"""What all processes of a run agree on: a process whose configuration says otherwise does not start.

- The first process of a run writes the contract; whoever starts while no other takes part may change it.
- The number of partitions changes only when no result is left unread.
- Onlookers take no part: the dashboard.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from pipeline.broker import Scripts, is_cluster
from pipeline.config.types import Config
from pipeline.decoding import read_json
from pipeline.errors import ConfigError, MessageError
from pipeline.heartbeat import ALIVE_S, StatusReporter
from pipeline.keys import Keys
from pipeline.logs import get_logger

ONLOOKERS = ("dashboard",)
_ASK_AGAIN_S = 0.25
_SHOWN = 4


def contract_of(config: Config) -> dict[str, Any]:
    """Configuration keys and their values."""
    sampling = cast("dict[str, Any]", msgspec.to_builtins(config.sampling))
    return {
        "consumer.count": config.consumer.count,
        "producer.samples_per_version": config.producer.samples_per_version,
        "producer.max_staleness": config.producer.max_staleness,
        "rollout_matching.task": config.rollout_matching.task,
        **{f"sampling.{name}": value for name, value in sampling.items()},
    }


async def take_part(client: Redis, config: Config, status: StatusReporter, wait_s: float = ALIVE_S + 1) -> None:
    """Announce a process that agrees with the contract; raises ConfigError that names the keys and both values.

    What a killed process has left of itself is waited for, for `wait_s`, until it no longer counts as alive.
    """
    keys, scripts, mine = Keys(config.run), Scripts(client), contract_of(config)
    await _refuse_old_names(client, keys)
    until, said = time.monotonic() + wait_s, False
    while True:
        status.row.at = time.time()
        args = [msgspec.json.encode(mine), status.row.name, msgspec.json.encode(status.row), int(ALIVE_S * 1000)]
        answer = await scripts.run(
            "agree", [keys.contract, keys.processes, keys.rollouts], [*args, keys.results, f",{','.join(ONLOOKERS)},"]
        )
        word, *about = [part.decode(errors="replace") if isinstance(part, bytes) else part for part in answer]
        if word == "ok":
            return
        theirs = _read(about[0])
        if word == "unread":
            old, new = theirs.get("consumer.count"), mine["consumer.count"]
            raise ConfigError(
                f"run {config.run!r}: consumer.count changes from {old} to {new}, and {about[2]} {about[1]}; "
                f"let the roles with consumer.count={old} end them first"
            )
        if time.monotonic() >= until:
            raise ConfigError(_refusal(config.run, mine, theirs, about[1:]))
        if not said:
            get_logger().warning("waiting for processes of another configuration to end", alive=about[1:])
        said = True
        await asyncio.sleep(_ASK_AGAIN_S)


def _read(stored: str) -> dict[str, Any]:
    try:
        return read_json(stored.encode(), dict[str, Any], "the contract")
    except MessageError:
        return {}


def _refusal(run: str, mine: dict[str, Any], theirs: dict[str, Any], alive: list[str]) -> str:
    keys = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
    both = [f"{key} is {_shown(theirs.get(key))} there and {_shown(mine.get(key))} here" for key in keys]
    names = ", ".join(alive[:_SHOWN]) + (f" and {len(alive) - _SHOWN} more" if len(alive) > _SHOWN else "")
    return (
        f"run {run!r} is under way with another configuration: {'; '.join(both)}; give this process the same one, or "
        f"end the others first ({names}): a change needs that nobody else takes part"
    )


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


async def _refuse_old_names(client: Redis, keys: Keys) -> None:
    """Names without braces are those of a release before them. Looked for once in a run's life."""
    raw: Any = client
    if is_cluster(client) or await raw.exists(keys.contract):
        return
    async for name in raw.scan_iter(match=f"sluice:{keys.run}:*", count=10_000):
        raise ConfigError(
            f"run {keys.run!r} was begun by an earlier release, which named its keys differently "
            f"({name.decode(errors='replace')}): finish it with that release, or begin a run of another name "
            "(--set run=NAME)"
        )
