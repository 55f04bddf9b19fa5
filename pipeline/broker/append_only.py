"""The append-only file of a broker whose disk was full for a while.

Redis from 7.0 on and Valkey (9.1 too) cut off a command of which a full disk took a part, and write it whole later.
Where the file was written anew since the start, that is behind the place where they had stopped, and for the zeros in
between they refuse the file at their next start:

    command command|000000|command command      a gap begins where a command ends

So the first process that was refused and gets through again asks for a new file (`Renewal`), and our own broker takes
such zeros out as it starts (`close_gaps`), with which nothing is lost.
"""

from __future__ import annotations

import mmap
import re
import time
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from sluice.pipeline.files import write_atomic
from sluice.pipeline.logs import get_logger

_UNWRITTEN = "MISCONF Errors writing to the AOF file"
_NO_ZERO = re.compile(rb"[^\0]")
_LENGTH = re.compile(rb"[*$](\d+)\r\n")
_NOTE = re.compile(rb"#[^\n]*\n")  # a timestamp
_LONGEST = 24  # bytes of a length
AGAIN_S = 30.0  # a rewrite that failed is asked for again


def could_not_write(error: Exception) -> bool:
    """Whether the broker refuses because it can't write its append-only file."""
    return _UNWRITTEN in str(error)


class Renewal:
    """Has the file written anew in the background, until that has worked: a rewrite may fail too, as on a disk that is
    soon full again. For a client that is used by one task."""

    def __init__(self) -> None:
        self._asked: float | None = None  # monotonic s; None: no new file is needed
        self._is_old = False  # the file that is being written was begun before the last refusal

    async def look(self, client: Redis, *, was_refused: bool) -> None:
        """One step, for each time that this process has got through.

        `was_refused`: since the last call of this. A broker that doesn't let us is only logged.
        """
        if self._asked is None and not was_refused:
            return
        try:
            await self._step(client, was_refused)
        except ResponseError as error:
            if "already in progress" in str(error):
                return
            get_logger().warning(
                "the broker can write its append-only file again, and might not load it at its next start; "
                "run BGREWRITEAOF there",
                error=str(error),
            )
            if "Can't execute" not in str(error):  # it doesn't let us
                self._asked = None

    async def _step(self, client: Redis, was_refused: bool) -> None:
        state = cast("dict[str, Any]", await cast(Any, client).info("persistence"))
        if int(state.get("aof_rewrite_in_progress", 0)) or int(state.get("aof_rewrite_scheduled", 0)):
            if self._asked is None:  # perhaps another process was quicker
                self._asked = time.monotonic()
            elif was_refused:
                self._is_old = True
        elif not int(state.get("aof_enabled", 0)):
            self._asked = None
        elif self._asked is None or was_refused or self._is_old:
            await self._ask(client, "the broker can write its append-only file again; it is written anew")
        elif state.get("aof_last_bgrewrite_status", "ok") == "ok":
            self._asked = None
        elif time.monotonic() - self._asked >= AGAIN_S:
            await self._ask(client, "the broker's append-only file could not be written anew; once more")

    async def _ask(self, client: Redis, why: str) -> None:
        self._asked, self._is_old = time.monotonic(), False
        await cast(Any, client).bgrewriteaof()
        get_logger().warning(why)


def close_gaps(directory: Path) -> int:
    """Take the zeros out of an ended broker's files; returns how many bytes. Files that are damaged otherwise stay as
    they are. Raises OSError."""
    taken = 0
    for file in [*directory.glob("appendonlydir/*.incr.aof"), *directory.glob("appendonly.aof")]:
        if not file.stat().st_size:
            continue
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if not (gaps := _gaps(data)):
                continue
            ends = [0, *(end for _, end in gaps)]
            parts = [data[end:begin] for end, (begin, _) in zip(ends, [*gaps, (len(data), 0)], strict=True)]
        write_atomic(file, b"".join(parts), mode=0o600)
        taken += sum(end - begin for begin, end in gaps)
    return taken


def _gaps(data: mmap.mmap) -> list[tuple[int, int]]:
    """Where there are only zeros between two commands; empty if that isn't all that is wrong."""
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(data):
        if data[at] == 0:
            after = _NO_ZERO.search(data, at)
            end = len(data) if after is None else after.start()
            found.append((at, end))
        else:
            end = _end_of_command(data, at)
            if end is None:
                return []
        at = end
    return found


def _end_of_command(data: mmap.mmap, at: int) -> int | None:
    """None: there is no command. One that is cut off ends with the file."""
    if note := _NOTE.match(data, at):
        return note.end()
    count = _LENGTH.match(data, at)
    if count is None:
        return None
    at = count.end()
    for _ in range(int(count[1])):
        if at >= len(data):
            break
        size = _LENGTH.match(data, at)
        if size is None:
            return len(data) if len(data) - at < _LONGEST else None
        at = size.end() + int(size[1]) + 2
    return min(at, len(data))
