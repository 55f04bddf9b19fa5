"""Renews this worker's leases from a separate thread, so a busy event loop or a long engine step loses none.

- Renewal stops after `stall_timeout_s` without progress: a hung engine or event loop loses its jobs.
- A lost lease (or an aborted job) cancels the local attempt through `on_lost(job_id, attempt)`.
- A process still stalled one lease later is killed, so that its successor can take over.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import redis

from sluice.pipeline.broker import connection
from sluice.pipeline.broker.scripts import BlockingScripts
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import BrokerError, EngineError
from sluice.pipeline.logs import get_logger
from sluice.pipeline.queue.queue import JobQueue
from sluice.pipeline.queue.types import Claim


class LeaseKeeper(threading.Thread):
    """Renews every `renew_s`; `hold` and `drop` are thread-safe. `progress` is monotonic seconds."""

    def __init__(
        self, config: Config, queue: JobQueue, progress: Callable[[], float], on_lost: Callable[[str, int | None], Any]
    ) -> None:
        super().__init__(name="lease-keeper", daemon=True)
        self._config, self._queue, self._progress, self._on_lost = config, queue, progress, on_lost
        short = min(config.broker.socket_timeout_s, config.worker.lease_s / 4)  # a slow answer must not cost the lease
        self._broker = msgspec.structs.replace(config.broker, socket_timeout_s=short, connect_timeout_s=short)
        self._client: redis.Redis | None = None
        self._scripts: BlockingScripts | None = None
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self.stalled = False

    def hold(self, claim: Claim) -> None:
        """Start renewing a claim."""
        with self._lock:
            self._held[claim.job_id] = claim.attempt

    def drop(self, job_id: str, attempt: int | None = None) -> None:
        """Stop renewing a claim, for this attempt only; a later one may be held by now."""
        with self._lock:
            if attempt in (None, self._held.get(job_id)):
                self._held.pop(job_id, None)

    def held(self) -> list[str]:
        """Ids of the jobs with leases it renews."""
        with self._lock:
            return list(self._held)

    def run(self) -> None:
        worker = self._config.worker
        while not self._end.wait(worker.renew_s):
            idle_s = time.monotonic() - self._progress()
            with self._lock:
                held = dict(self._held)
            self.stalled = bool(held) and idle_s > worker.stall_timeout_s
            if self.stalled:
                get_logger().error("stalled; letting its leases expire", idle_s=round(idle_s, 1), jobs=sorted(held)[:8])
                if idle_s > worker.stall_timeout_s + worker.lease_s:
                    get_logger().error("still stalled; exiting", idle_s=round(idle_s, 1))
                    os._exit(EngineError.exit_code)
            elif held:
                self._renew(held)
        self._disconnect()

    def stop(self) -> None:
        self._end.set()
        self.join(timeout=self._config.broker.socket_timeout_s + 1)

    def _renew(self, held: dict[str, int]) -> None:
        try:
            if self._client is None or self._scripts is None:
                self._client = connection.connect_sync(self._broker, self._config.run)
                self._scripts = BlockingScripts(self._client)
            lost = self._scripts.ask(self._queue.names, self._queue.renewal(self._config.worker.lease_s, held))
        except (redis.RedisError, BrokerError) as error:
            get_logger().warning("renewal failed; the next one is due soon", error=str(error))
            self._disconnect()  # in a cluster the run may have moved to another node
            return
        for job_id in lost:
            self._on_lost(job_id, held.get(job_id))

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = self._scripts = None
