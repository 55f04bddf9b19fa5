"""What one run does."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.pipeline.errors import ConfigError

Settings = dict[str, float | int | bool]

ARQ_GRID: tuple[Settings, ...] = (
    {"max_jobs": 10, "poll_delay": 0.01},
    {"max_jobs": 50, "poll_delay": 0.01},
    {"max_jobs": 50, "poll_delay": 0.01, "queue_read_limit": 50},
    {"max_jobs": 50, "poll_delay": 0.001, "queue_read_limit": 50},
    {"max_jobs": 50, "poll_delay": 0.01, "queue_read_limit": 50, "log_results": False, "keep_result": 0},
    {"max_jobs": 200, "poll_delay": 0.01},
)
"""Of arq's worker; its defaults are max_jobs 10, poll_delay 0.5, queue_read_limit 5 × max_jobs and at least 100."""


@dataclass(frozen=True)
class Plan:
    """Seconds and counts are per round; `jobs` are ours, the others get as many as they end in `seconds`."""

    workers: tuple[int, ...] = (1, 2, 4, 8)
    jobs: int = 30_000
    rounds: int = 3
    seconds: float = 2.0
    grid: tuple[Settings, ...] = ARQ_GRID
    probe_jobs: int = 400
    idle_jobs: int = 400
    bulk_jobs: int = 40_000
    commit_kb: tuple[int, ...] = (1, 16, 256)
    commit_s: float = 1.5
    depths: tuple[int, ...] = (1_000, 1_000_000)
    claims: int = 2_000
    death_workers: tuple[int, ...] = (2, 4)
    death_jobs: int = 64
    death_job_s: float = 1.0

    @classmethod
    def of(cls, *, workers: tuple[int, ...], jobs: int | None, quick: bool) -> Plan:
        """Checked. Raises ConfigError."""
        if not workers or min(workers) < 1 or (jobs is not None and jobs < 1):
            raise ConfigError("--workers and --jobs must be at least 1")
        counts = tuple(sorted(set(workers)))
        if not quick:
            return cls(workers=counts, jobs=jobs or cls.jobs)
        return cls(
            workers=counts, jobs=jobs or 500, rounds=1, seconds=0.2, grid=ARQ_GRID[:1], probe_jobs=60, idle_jobs=20,
            bulk_jobs=1_000, commit_s=0.05, depths=(100, 2_000), claims=50,
            death_workers=(2,), death_jobs=16, death_job_s=0.3,
        )  # fmt: skip
