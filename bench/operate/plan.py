"""What one run does."""

from __future__ import annotations

import msgspec

from sluice.bench.pipeline.plan import HOME
from sluice.pipeline.errors import ConfigError

__all__ = ["HOME", "Plan"]

RUN = "operate"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Counts."""

    finished: int = 100_000  # sequences in the history
    queued: int = 512  # jobs in the queue, and as many dead letters
    requests: int = 40  # of each page
    helps: int = 15  # starts of `sluice --help`
    rounds: int = 12  # with and without metrics
    sequences: int = 384  # of a round
    workers: int = 2

    @classmethod
    def of(cls, *, finished: int | None, rounds: int | None, quick: bool) -> Plan:
        """Checked. Raises ConfigError."""
        plan = cls(finished=400, queued=20, requests=2, helps=1, rounds=1, sequences=16, workers=1) if quick else cls()
        plan = plan if finished is None else msgspec.structs.replace(plan, finished=finished)
        plan = plan if rounds is None else msgspec.structs.replace(plan, rounds=rounds)
        if min(plan.finished, plan.rounds) < 1:
            raise ConfigError("--sequences and --rounds must be at least 1")
        return plan
