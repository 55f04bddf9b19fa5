"""Who holds which job, at which time of the broker's clock: one atomic look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from sluice.pipeline.wire.keys import Keys

_LOOK = """
local t, out = redis.call('TIME'), {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local f = redis.call('HMGET', ARGV[1] .. id, 'owner', 'worker', 'alone')
  out[#out + 1] = { id, f[1] or '', f[2] or '', f[3] or '' }
end
return { tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000), out }
"""


@dataclass(frozen=True)
class Lease:
    """One job that a worker holds."""

    owner: str  # nonce of the process
    worker: str  # its name, which its successor will have too
    alone: bool


@dataclass(frozen=True)
class Leases:
    """All jobs of a run that are not finished."""

    at_s: float  # the broker's clock
    held: dict[str, Lease]
    waiting: frozenset[str]

    def of(self, worker: str) -> dict[str, Lease]:
        """What a worker holds, by job."""
        return {job: lease for job, lease in self.held.items() if lease.worker == worker}


def look(client: redis.Redis, keys: Keys) -> Leases:
    """The leases now."""
    at_ms, rows = _run(client, keys)
    held = {text(job): Lease(text(owner), text(worker), bool(alone)) for job, owner, worker, alone in rows if owner}
    return Leases(at_ms / 1000, held, frozenset(text(row[0]) for row in rows if not row[1]))


def text(raw: bytes) -> str:
    """Any bytes as a string that no other bytes give."""
    return raw.decode(errors="surrogateescape")


def _run(client: Any, keys: Keys) -> tuple[int, list[tuple[bytes, bytes, bytes, bytes]]]:
    return client.eval(_LOOK, 1, keys.jobs, keys.job_state)
