"""What one run does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sluice.bench.pipeline.model import ensure_model
from sluice.pipeline.errors import ConfigError

HOME = Path(".sluice/bench")
_LEAST = 1000
_SAMPLES, _FEWEST_SAMPLES = 500, 50  # of one batch; the last one is whole
_TOMBSTONE_S = 2.0


@dataclass(frozen=True)
class Plan:
    """`count` jobs are queued, and as many sequences go through a run."""

    count: int
    workers: int
    idle_s: float
    model: Path

    @classmethod
    def of(cls, *, count: int, workers: int, idle_s: float) -> Plan:
        """Checked; the model is made when it is not there yet. Raises ConfigError."""
        if count < _LEAST or workers < 1 or idle_s <= 0:
            raise ConfigError(f"--count must be at least {_LEAST}, --workers 1, and --idle-s more than 0")
        return cls(count, workers, idle_s, ensure_model(HOME).resolve())

    @property
    def span(self) -> int:
        """Sequences of which the time is taken at each mark: 10,000 of a million."""
        return self.count // 100

    @property
    def marks(self) -> tuple[int, int, int]:
        """Where the time of the last `span` sequences is taken."""
        return self.span, 10 * self.span, 100 * self.span

    @property
    def batch(self) -> int:
        """Sequences of one training batch; each costs the trainer an fsync."""
        return min(_SAMPLES, max(_FEWEST_SAMPLES, self.span // 10))

    @property
    def rows(self) -> int:
        """Some more than are measured: the last mark must not be the moment in which the run drains."""
        return self.count + 8 * self.batch

    def overrides(self, home: Path, data: Path) -> list[str]:
        """`--set` values of the run."""
        return [
            "run=scale",
            f"run_dir={home / 'runs'}",
            f"data.path={data}",
            f"model.path={self.model}",
            f"producer.samples_per_version={self.batch}",
            f"producer.max_in_flight={8 * self.batch}",
            "producer.max_staleness=2",
            "worker.max_batch=256",
            "worker.claim_gpu=false",
            f"worker.keep_result_s={_TOMBSTONE_S}",
            "rollout_matching.task=exact_answer",
            "trainer.external=true",
            "metrics.enabled=false",
        ]
