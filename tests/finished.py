"""Finished groups for tests of the history, as a consumer would record them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice.consumers.history.files import consumer_file
from sluice.consumers.history.recorder import Finished, FinishedJob, HistoryStore
from sluice.consumers.history.records import SequenceRow
from tests.factories import sequence_result, training_sample


def row(job_id: str, index: int = 0, size: int = 1, **changes: Any) -> SequenceRow:
    """A sequence that was handed on."""
    fields: dict[str, Any] = {"state": "handed_on", "at": 100.0, "worker": "w", "task": "t", "finish_reason": "stop"}
    return SequenceRow(seq_id=f"{job_id}:{index}", job_id=job_id, index=index, group_size=size, **{**fields, **changes})


def job(job_id: str, *rows: SequenceRow, size: int = 1, log: bytes = b"", **changes: Any) -> FinishedJob:
    """A group of `size` such sequences, or of these."""
    members = rows or tuple(row(job_id, index, size, **changes) for index in range(size))
    return FinishedJob(job_id=job_id, sequences=[Finished(row=member) for member in members], log=log)


def whole(job_id: str, **changes: Any) -> FinishedJob:
    """A group of one with its messages."""
    sample = training_sample(f"{job_id}:0")
    return FinishedJob(
        job_id=job_id, sequences=[Finished.of(row(job_id, **changes), sequence_result(job_id), sample, None)]
    )


def store(directory: Path, partition: int = 0, **limits: Any) -> HistoryStore:
    """The writer of one partition."""
    return HistoryStore(directory / consumer_file(partition), **limits)
