"""Roles that only one process holds at a time (a consumer per partition, the trainer).

The owner's nonce fences every effect: a paused owner that comes back late is refused by the scripts.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from redis.asyncio import Redis

from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, Own, RoleKey
from sluice.pipeline.errors import BrokerDataGone, DeadlineExceeded, LeaseLost, SluiceError
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.waits import Waiting, WaitKind

TTL_S = 5.0
_POLL_S = 0.2


async def why_fenced(scripts: Scripts, key: str) -> SluiceError:
    """The error for a process that a script refused as this role's owner: another has it, or the data are gone."""
    role = key.rpartition("owner:")[2]
    if await scripts.client.exists(key, f"{key}:last"):
        return LeaseLost(f"{role}: another process took over this role; stopping")
    return BrokerDataGone(
        f"{role}: the broker's data are gone, including this process's claim on the role. Restart the process: rows "
        "are read again, trained sequences stay trained, and work in progress is redone"
    )


class Ownership:
    """Holds one role while its `keep` task runs."""

    def __init__(self, client: Redis, keys: Keys, role: str) -> None:
        self._scripts = Scripts(client)
        self.role = role
        self.key = f"{keys.owner}{role}"
        self._held = self._released = False
        self.nonce = secrets.token_hex(8)

    async def acquire(self, deadline_s: float, waiting: Waiting) -> None:
        """Take the role, waiting for an earlier owner's claim to expire; DeadlineExceeded names it.

        Counts only the time between questions: a broker outage isn't the other process's fault.
        """
        waited_s = 0.0
        while not await self.try_acquire():
            waiting(WaitKind.ROLE, self.role)
            if waited_s >= deadline_s:
                raise DeadlineExceeded(f"{self.role}: another process has held this role for {deadline_s:.0f} s")
            began = time.monotonic()
            await asyncio.sleep(_POLL_S)
            waited_s += time.monotonic() - began
        waiting(None)

    async def keep(self) -> None:
        """Renew until released or cancelled; raises as `why_fenced` when the role is lost."""
        while not self._released:
            await asyncio.sleep(TTL_S / 4)
            if not self._released:
                await self.confirm()

    async def confirm(self) -> None:
        """Call it before an effect that no script fences (files); raises as `why_fenced` when the role is lost."""
        if not await self.try_acquire() and not self._released:
            raise await why_fenced(self._scripts, self.key)

    async def release(self) -> None:
        """Give the role up immediately; a renewal in flight doesn't retake it."""
        self._released = True
        await self._scripts.ask(RoleKey(owner=self.key), Disown(nonce=self.nonce))

    async def try_acquire(self) -> bool:
        """Take or renew the role; False while another process holds it, and permanently once one has held it since."""
        request = Own(nonce=self.nonce, ttl_ms=int(TTL_S * 1000), renew=self._held)
        ours = bool(await self._scripts.ask(RoleKey(owner=self.key), request))
        self._held = self._held or ours
        return ours
