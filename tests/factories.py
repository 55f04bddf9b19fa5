"""Messages for tests."""

from __future__ import annotations

from typing import Any

from sluice.pipeline.wire.messages import DecodeJob, SamplingParams, SequenceResult, TrainingSample
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray


def decode_job(job_id: str, *, n: int = 1, **changes: Any) -> DecodeJob:
    """A job of one user message."""
    fields: dict[str, Any] = {
        "run": job_id.partition(":")[0],
        "job_id": job_id,
        "n": n,
        "messages": [{"role": "user", "content": "hello"}],
        "sampling": SamplingParams(max_new_tokens=8),
    }
    return DecodeJob(**{**fields, **changes})


def sequence_result(group_id: str, index: int = 0, size: int = 1, **changes: Any) -> SequenceResult:
    """A result of three tokens."""
    fields: dict[str, Any] = {
        "seq_id": f"{group_id}:{index}",
        "group_id": group_id,
        "group_size": size,
        "index": index,
        "prompt_token_ids": TokenArray([5, 6]),
        "token_ids": TokenArray([7, 8, 9]),
        "logprobs": FloatArray([-0.5, -1.0, -1.5]),
        "versions": Runs.of([0, 0, 0]),
        "finish_reason": "stop",
    }
    return SequenceResult(**{**fields, **changes})


def training_sample(seq_id: str, length: int = 4, **changes: Any) -> TrainingSample:
    """A sample with all but the first token supervised."""
    fields: dict[str, Any] = {
        "seq_id": seq_id,
        "group_id": seq_id.rpartition(":")[0],
        "task": "detection",
        "token_ids": TokenArray(range(length)),
        "labels": TokenArray(range(length)),
        "weights": FloatArray([0.0] + [1.0] * (length - 1)),
        "segments": Runs.of([0] * length),
        "prompt_len": 1,
    }
    return TrainingSample(**{**fields, **changes})
