"""What one benchmark run does, and the settings that both sides get."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sluice.bench.pipeline.model import ensure_model
from sluice.pipeline.errors import ConfigError

HOME = Path(".sluice/bench")
RUN = "bench"


@dataclass(frozen=True)
class Plan:
    """Counts are per round; `digits` says that the prompts are the demo's scenes."""

    sequences: int
    workers: int
    rounds: int
    max_batch: int
    model: Path
    digits: bool

    @classmethod
    def of(cls, *, sequences: int, workers: int, rounds: int, max_batch: int, model: Path | None) -> Plan:
        """Checked; the default model is made when it is not there yet. Raises ConfigError."""
        if min(sequences, workers, rounds, max_batch) < 1:
            raise ConfigError("--sequences, --workers, --rounds and --max-batch must be at least 1")
        if sequences < workers:
            raise ConfigError(f"--sequences {sequences} is less than --workers {workers}; give each at least one")
        directory = ensure_model(HOME) if model is None else model
        return cls(sequences, workers, rounds, max_batch, directory.resolve(), digits=model is None)

    def overrides(self) -> list[str]:
        """`--set` values of the run's configuration, the same for the bare engines and the workers."""
        return [
            f"run={RUN}",
            "seed=0",
            f"model.path={self.model}",
            f"worker.max_batch={self.max_batch}",
            "worker.claim_gpu=false",
            "worker.torch_threads=1",
            "worker.drain_s=1",
            "rollout_matching.task=exact_answer",
        ]
