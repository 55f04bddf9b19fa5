"""Was every sequence trained exactly once? Checked by ids, not by counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice.consumers.training.step_log import read_steps
from sluice.pipeline.config import Config
from sluice.pipeline.queue import job_id_for, rollout_group_for
from sluice.pipeline.status.snapshot import Snapshot
from sluice.producers.source import Row, identity, read_rows


@dataclass(frozen=True)
class Audit:
    """Counts of sequences; `versions` counts published weight versions after the warm start."""

    enqueued: int
    trained: int
    dead: int
    dropped: int
    lost: int
    duplicated: int
    versions: int


def audit(config: Config, run_dir: Path) -> Audit:
    """Compare the ids that the data implies with those in the trainer's ledger."""
    now = read_summary(run_dir)
    trained = Counter(seq_id for step in read_steps(run_dir / "trained.jsonl") for seq_id in step["seq_ids"])
    expected = _expected(config)
    return Audit(
        enqueued=now.enqueued,
        trained=len(trained),
        dead=now.dead,
        dropped=now.dropped,
        lost=len(expected - set(trained)) - now.dead - now.dropped,
        duplicated=sum(count - 1 for count in trained.values()) + len({_whole(one) for one in trained} - expected),
        versions=now.latest_version or 0,
    )


def read_summary(run_dir: Path) -> Snapshot:
    """The run's state at its end; raises FileNotFoundError if it has none."""
    return msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Snapshot)


def _whole(seq_id: str) -> str:
    """The sequence's id; if a rollout's history forked, each trajectory after the first is named `<id>/<part>`."""
    return seq_id.partition("/")[0]


def _expected(config: Config) -> set[str]:
    n, name_of = config.producer.group_size, rollout_group_for if config.rollout.url else job_id_for
    return {
        f"{name_of(config.run, identity(row), epoch, config.sampling, n)}:{index}"
        for epoch in range(config.data.epochs)
        for row in read_rows(config.data)
        if isinstance(row, Row)
        for index in range(n)
    }
