"""What a killed worker had of its sequences is decoded on by another one: the tokens are those of no kill at all."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from pathlib import Path

import pytest

from sluice.pipeline.config.types import WorkerConfig
from sluice.pipeline.queue import seed_for
from sluice.pipeline.wire.messages import SequenceResult
from sluice.workers.engine.backends import make_backend
from sluice.workers.engine.contracts import SequenceOutput, SequenceRequest
from tests.chaos.blows import PATIENT, stop_while_it_decodes
from tests.contract.engine_fixtures import reference
from tests.contract.near_ties import assert_same_unless_near_tie
from tests.e2e.fixtures import MakeStack, text_rows
from tests.e2e.stack import Stack

pytestmark = pytest.mark.chaos
JOBS = 1000  # minutes of work: the first worker isn't done before it is killed
SAMPLING = {"temperature": 1.5, "top_p": 0.95, "max_new_tokens": 180}
VLLM = {"enforce_eager": True, "max_model_len": 256}


@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_stored_progress_of_a_killed_worker_is_decoded_on(make_stack: MakeStack, model_dir: Path, backend: str) -> None:
    worker = {**PATIENT, "backend": backend, "checkpoint_tokens": 8, "max_batch": 4, "lease_s": 2, "vllm": VLLM}
    producer = {"max_in_flight": JOBS, "samples_per_version": JOBS}
    stack = make_stack(text_rows(JOBS), "exact_answer", sampling=SAMPLING, worker=worker, producer=producer)
    killed = stack.start("worker")
    stack.start("produce")
    held = stop_while_it_decodes(stack, killed)
    killed.kill()
    stack.start("worker")
    stack.wait(lambda _: len(results_of(stack, held)) == len(held), "the other worker's results")
    found = results_of(stack, held)
    resumed = [result for result in found if result.resumed_tokens]
    assert resumed, f"nothing was decoded on: {[result.resumed_tokens for result in found]}"
    wanted, model, compared = requests(stack, found), reference(model_dir), 0
    for result, request, output in zip(found, wanted, uninterrupted(stack, wanted), strict=True):
        same = assert_same_unless_near_tie(model, request, output.token_ids, result.token_ids)
        assert list(result.logprobs[:same]) == pytest.approx(output.logprobs[:same], abs=1e-4)
        if same == len(output.token_ids):
            assert (result.text, result.finish_reason) == (output.text, output.finish_reason)
        compared += 0 < result.resumed_tokens < same
    assert compared, "each of them parted from its like before the place where it was decoded on"


def results_of(stack: Stack, jobs: Set[str]) -> list[SequenceResult]:
    return [result for result in stack.results() if result.seq_id.rpartition(":")[0] in jobs]


def requests(stack: Stack, found: list[SequenceResult]) -> list[SequenceRequest]:
    return [
        SequenceRequest(
            result.seq_id,
            tuple(result.prompt_token_ids),
            result.sampling,
            seed_for(stack.config.seed, result.group_id, result.index),
        )
        for result in found
    ]


def uninterrupted(stack: Stack, wanted: list[SequenceRequest]) -> list[SequenceOutput]:
    """By the HF engine in this process, each decoded in one go."""

    async def decode_all() -> list[SequenceOutput]:
        engine = make_backend(stack.config.model, WorkerConfig(torch_threads=0))
        await engine.start()
        try:
            return await asyncio.gather(*(engine.decode(request) for request in wanted))
        finally:
            await engine.close()

    return asyncio.run(decode_all())
