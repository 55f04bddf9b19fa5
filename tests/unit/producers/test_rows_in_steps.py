"""A deterministic run's rows: which step trains each, and which version decodes it."""

from __future__ import annotations

from sluice.pipeline.config import load_config
from sluice.pipeline.queue import StepRow, step_row_of
from sluice.producers.source import Row
from sluice.producers.submit import in_its_step, job_of

CONFIG = load_config(
    None,
    [
        "deterministic=true", "worker.max_batch=1", "worker.checkpoint_tokens=0", "model.device=cpu",
        "producer.group_size=2", "producer.samples_per_version=6", "producer.max_staleness=1", "data.epochs=2",
    ],
    environ={},
)  # fmt: skip
ROWS = 4  # of an epoch: 3 to a step, 8 in all
SAME = Row(messages=[{"role": "user", "content": "one of many"}])


def test_each_step_has_its_rows_in_order_and_one_version() -> None:
    jobs = [in_its_step(CONFIG, job_of(CONFIG, SAME, number // ROWS), number, ROWS) for number in range(2 * ROWS)]
    assert [step_row_of(job.job_id) for job in jobs] == [
        *(StepRow(0, row, 3) for row in range(3)),
        *(StepRow(1, row, 3) for row in range(3)),
        *(StepRow(2, row, 2) for row in range(2)),
    ]
    assert [job.max_weight_version for job in jobs] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert all(job.min_weight_version == job.max_weight_version for job in jobs)
    assert len({job.job_id for job in jobs}) == len(jobs), "equal rows are each trained at their own place"
