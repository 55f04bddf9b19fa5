"""The source's place in Redis: which data a run reads, how far it got, what it skipped."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

from pipeline.config.types import Config
from pipeline.errors import ConfigError
from pipeline.logs import get_logger
from pipeline.queue import Credit
from pipeline.run.resume_point import read_cursor
from pipeline.run.role import Role
from pipeline.wire.codec import shown
from producers.sources import Malformed, fingerprint

NOWHERE = "-1:-1"  # the cursor before the first row


class SourcePlace:
    """Owned by the one producer of a run."""

    def __init__(self, role: Role) -> None:
        self._client: Any = role.client
        self._key, self._config = role.keys.source, role.config
        self._malformed = 0

    async def open(self, total: int, credit: Credit) -> str:
        """Tie the run to its data, announce the total; returns the cursor of the last job."""
        held = await cast("Awaitable[dict[bytes, bytes]]", self._client.hgetall(self._key))
        data = fingerprint(self._config.data)
        if note := refuse_other_source(self._config, held, data):
            get_logger().warning(note, path=self._config.data.path)
        limits = {  # for status pages
            "max_in_flight": credit.max_in_flight,
            "max_bytes": credit.max_bytes,
            "per_version": credit.samples_per_version,
            "staleness": credit.max_staleness,
            "group": self._config.producer.group_size,
        }
        path = self._config.data.path
        await self._set(data=data, path=path, total=total, exhausted=0, **limits)
        return self._cursor(held.get(b"cursor", NOWHERE.encode()))

    def _cursor(self, raw: bytes) -> str:
        """Nobody knows where a damaged one was: rows are read from the first, and those that are known are skipped."""
        if (place := read_cursor(raw)) is not None:
            return f"{place[0]}:{place[1]}"
        get_logger().warning(
            "the stored position in the data is none; reading from the first row",
            key=self._key,
            cursor=shown(raw),
            help="HSET that key's field cursor to EPOCH:ROW, both from 0, and start again to go on behind that row",
        )
        return NOWHERE

    def skip(self, row: Malformed) -> None:
        """Count a malformed row, or raise its DataError where the config says stop."""
        if self._config.data.on_malformed == "stop":
            raise row.error()
        self._malformed += 1
        get_logger().warning("row skipped", where=row.where, problem=row.problem)

    def rewind(self) -> None:
        """The rows are read again from the first one."""
        self._malformed = 0

    async def store_skipped(self) -> None:
        """The count from the first row on, so that a restart counts no row twice."""
        if self._malformed:
            await self._set(malformed=self._malformed)

    async def finish(self) -> None:
        """Say that there is nothing more to come."""
        await self._set(exhausted=1)

    async def _set(self, **values: Any) -> None:
        await cast("Awaitable[int]", self._client.hset(self._key, mapping=values))


def refuse_other_source(config: Config, held: dict[bytes, bytes], data: str) -> str | None:
    """Raise ConfigError when the run was begun on other data than now; what else is worth saying.

    Other data under a known run name would be skipped in silence. `held` is what the broker has of the source, `data`
    the fingerprint of the file.
    """
    run, path = config.run, config.data.path
    name_it = "give this one a name of its own (--set run=NAME)"
    if held.get(b"data", data.encode()) == data.encode():
        return None
    if held.get(b"exhausted") == b"1" or held.get(b"path") != path.encode():
        raise ConfigError(f"run {run!r} was started on other data than {path}; {name_it}, or restore the file")
    return "the data file has changed; its first rows are not read again"
