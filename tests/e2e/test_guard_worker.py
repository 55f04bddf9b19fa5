"""Enabled and not active: the worker ends before it takes a job; too late to fire: it says so and serves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.broker import connection as broker
from sluice.pipeline.queue import Credit, JobQueue
from tests.e2e.fixtures import MakeStack
from tests.e2e.stack import STOPPED, Stack
from tests.factories import decode_job
from tests.loop_models import in_lower_case, without_end
from tests.tiny_models import save_tiny_model


def job_ids(stack: Stack) -> list[str]:
    return [f"{stack.run}:{name}" for name in "abc"]


def guarded(make_stack: MakeStack, *, model: Path | None = None, worker: Any = None, **guard: Any) -> Stack:
    """A run with jobs that wait, and the guard on."""
    rules = {"enabled": True, "min_new_tokens": 4, **guard}
    sections: dict[str, Any] = {} if model is None else {"model": {"path": str(model)}}
    stack = make_stack([], rollout_matching={"repeat_terminate": rules}, worker=worker or {}, **sections)
    asyncio.run(_enqueue(stack))
    return stack


async def _enqueue(stack: Stack) -> None:
    connection = broker.connect(stack.broker_config)
    try:
        jobs = [decode_job(job_id) for job_id in job_ids(stack)]
        assert set(await JobQueue(connection, stack.keys).enqueue(jobs, Credit(100, 100, 1))) == {"enqueued"}
    finally:
        await connection.aclose()


def assert_no_job_was_taken(stack: Stack) -> None:
    assert stack.snapshot().queued_jobs == 3
    assert stack.leased() == {}
    with stack.client() as client:
        raw: Any = client
        assert [raw.hget(stack.keys.job_state + job_id, "attempt") for job_id in job_ids(stack)] == [None] * 3


def test_a_guard_that_cannot_be_active_ends_the_worker_before_it_takes_a_job(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    endless = without_end(save_tiny_model(tmp_path / "endless"))
    lower = in_lower_case(save_tiny_model(tmp_path / "lower"))
    misspelt = guarded(make_stack)
    misspelt.config_file.write_text(misspelt.config_file.read_text().replace("min_new_tokens", "min_new_token"))
    stacks = {
        "end-of-sequence id to force": guarded(make_stack, model=endless),
        "'object_KEY' occurs 3 times in an answer, but 0 times in its tokens": guarded(
            make_stack, model=lower, max_object_keys=3, object_key_prefix="object_KEY"
        ),
        f"{misspelt.config_file}: unknown key rollout_matching.repeat_terminate.min_new_token; did you mean "
        "'min_new_tokens'": misspelt,
    }
    workers = [stack.start("worker") for stack in stacks.values()]
    for (says, stack), worker in zip(stacks.items(), workers, strict=True):
        worker.expendable = True
        assert worker.wait() == 2, worker.tail()
        [error] = [line for line in worker.text().splitlines() if line.startswith("error: ")]
        assert says in error
        assert "repeat_terminate" in error
        assert_no_job_was_taken(stack)


@pytest.mark.vllm
def test_vllm_with_speculative_decoding_ends_the_worker_before_it_takes_a_job(make_stack: MakeStack) -> None:
    guess = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    options = {"enforce_eager": True, "kv_cache_gb": 0.01, "extra": {"speculative_config": guess}}
    stack = guarded(make_stack, worker={"backend": "vllm", "vllm": options})
    worker = stack.start("worker")
    worker.expendable = True
    assert worker.wait() == 5, worker.tail()
    assert "logits processors are not supported when speculative decoding is enabled" in worker.text()
    assert_no_job_was_taken(stack)


def test_a_guard_that_arms_too_late_warns_and_serves(make_stack: MakeStack) -> None:
    stack = guarded(make_stack, min_new_tokens=12)
    assert stack.config.sampling.max_new_tokens == 12
    worker = stack.start("worker")
    stack.wait(lambda now: now.queued_jobs == 0 and not stack.leased(), "the jobs to be decoded")
    assert worker.terminate() in (0, STOPPED), worker.tail()
    text = worker.text()
    assert "the repeat guard can never fire: min_new_tokens is not below max_new_tokens" in text
    assert text.index("can never fire") < text.index("repeat guard proved") < text.index("engine ready")
