"""What a supervisor does about a process that died: its leases end at once, and its row leaves the status page,
unless it had last words.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pipeline.config.types import Config
from pipeline.errors import MessageError
from pipeline.heartbeat import Heartbeat, read_row
from pipeline.jobs import JobQueue
from pipeline.keys import Keys
from pipeline.logs import get_logger
from pipeline.supervise import Child


class Deaths:
    """Knows the dead by their last heartbeat; one that never gave any held nothing."""

    def __init__(self, client: Redis, config: Config) -> None:
        self._client, self._keys, self._worker = client, Keys(config.run), config.worker
        self._queue = JobQueue(
            client, self._keys, partitions=config.consumer.count, keep_result_s=config.worker.keep_result_s
        )

    async def settle(self, child: Child, pid: int) -> None:
        """Waits for a broker that is away: whoever calls sets the deadline, as leases run out by themselves."""
        try:
            raw = await cast("Awaitable[bytes | None]", self._client.hget(self._keys.processes, child.name))
            if raw is None:
                return
            row = read_row(raw, Heartbeat)
        except (MessageError, ResponseError) as error:  # its leases run out by themselves
            get_logger().warning("the row of a dead process cannot be read", process=child.name, problem=str(error))
            return
        if (row.pid, row.host) != (pid, socket.gethostname()):
            return  # its successor's
        owner = row.facts.get("owner")
        if isinstance(owner, str):
            jobs = await self._queue.reap(owner, self._worker.max_attempts, killed=child.killed == pid)
            get_logger().warning("leases of a dead process ended", process=child.name, pid=pid, jobs=jobs)
        if row.ended_at is None:  # else its last words stay, until its successor has a row
            await cast("Awaitable[int]", self._client.hdel(self._keys.processes, child.name))
