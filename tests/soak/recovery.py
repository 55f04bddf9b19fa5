"""How long the jobs of a dead worker were without a holder, by the broker's clock.

- A recovery ends when each of the dead worker's jobs is leased by another process or is over.
- It is `clean` when nothing else went wrong meanwhile that recovery depends on: a second worker that was ready all
  the time, a broker that answered, no job that must run apart. Only clean ones are held against the bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.soak.leases import Leases

# The bound holds for the median. What a busy machine may add to a single one: two cores carry all processes of the run
# and other tests beside them, so a worker that is ready may come to its next claim seconds late.
NOISE_S = 20.0
ENOUGH = 5  # a median of fewer says more of one of them


@dataclass
class Recovery:
    """One worker's death."""

    worker: str
    since_s: float  # the broker's clock
    jobs: dict[str, str]  # job → nonce of the dead owner
    clean: bool
    took_s: float | None = None


@dataclass
class Recoveries:
    """All deaths so far."""

    all: list[Recovery] = field(default_factory=list)

    def began(self, worker: str, leases: Leases, *, clean: bool) -> int:
        """A worker died with the leases of this look; returns how many."""
        jobs = {job: lease.owner for job, lease in leases.of(worker).items()}
        if jobs:
            self.all.append(Recovery(worker, leases.at_s, jobs, clean))
        return len(jobs)

    def spoil(self) -> None:
        """Something else went wrong: those under way say nothing about the bound."""
        for recovery in self._under_way():
            recovery.clean = False

    def look(self, leases: Leases) -> None:
        """What has been taken over since."""
        for recovery in self._under_way():
            lost = recovery.jobs
            recovery.clean &= not any(job in leases.held and leases.held[job].alone for job in lost)
            if all(_is_elsewhere(job, owner, leases) for job, owner in lost.items()):
                recovery.took_s = leases.at_s - recovery.since_s

    def took(self, *, clean: bool) -> list[float]:
        """Seconds of each that has ended, shortest first."""
        return sorted(r.took_s for r in self.all if r.took_s is not None and (r.clean or not clean))

    def summary(self) -> dict[str, Any]:
        """Seconds, rounded; `clean_…` are those that the bound holds for."""
        every, clean = self.took(clean=False), self.took(clean=True)
        return {
            "count": len(every),
            "p50_s": round(statistics.median(every), 3) if every else 0.0,
            "max_s": round(max(every, default=0.0), 3),
            "clean_count": len(clean),
            "clean_p50_s": round(statistics.median(clean), 3) if clean else 0.0,
            "clean_max_s": round(max(clean, default=0.0), 3),
            "clean_s": [round(took_s, 3) for took_s in clean],
        }

    def assert_within(self, lease_s: float, earlier: Sequence[float] = ()) -> None:
        """The median of the clean ones, with `earlier` parts', is lease + 1 s at most; none is far beyond it."""
        self.assert_ended()
        bound_s, clean = lease_s + 1, [*earlier, *self.took(clean=True)]
        late = [took_s for took_s in clean if took_s > bound_s + NOISE_S]
        assert not late, f"later than {bound_s + NOISE_S} s: {late}"
        if len(clean) >= ENOUGH:
            assert statistics.median(clean) <= bound_s, f"median {statistics.median(clean):.2f} > {bound_s} s: {clean}"

    def assert_ended(self) -> None:
        """Whatever was lost has been taken over."""
        assert not list(self._under_way()), "jobs of a dead worker were never taken over"

    def _under_way(self) -> list[Recovery]:
        return [recovery for recovery in self.all if recovery.took_s is None]


def _is_elsewhere(job: str, dead_owner: str, leases: Leases) -> bool:
    if job in leases.held:
        return leases.held[job].owner != dead_owner
    return job not in leases.waiting
