"""The contract of decoding, over the real HF backend and a tiny real model."""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from sluice.pipeline.config.types import ModelConfig
from sluice.pipeline.errors import EngineError, ModelError, RequestError
from sluice.pipeline.wire.messages import Progress, SamplingParams
from sluice.workers.engine.contracts import Backend, SequenceRequest
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import (
    at_first_report,
    decode_all,
    ragged_prompts,
    reference,
    reference_logprobs,
    request,
    run,
    started,
)
from tests.deadlines import HANG_S
from tests.tiny_models import CONTEXT, save_tiny_model

PROMPT = list(b"the abc of it")


def test_greedy_tokens_equal_generate_on_ragged_prompts(backend: Backend, plain: Any) -> None:
    prompts = ragged_prompts(20)
    outputs = run(backend, *(request(p, max_new_tokens=4 + 5 * i) for i, p in enumerate(prompts)))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(output.token_ids), do_sample=False
        )
        assert output.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("groups", [1, 2])
def test_logprobs_equal_a_plain_forward_pass(tmp_path: Path, groups: int) -> None:
    directory = save_tiny_model(tmp_path, seed=groups, groups=groups)
    prompts = ragged_prompts(7, seed=groups)
    with started(directory, max_batch=4) as backend:
        outputs = run(backend, *(request(p, i, temperature=0.8) for i, p in enumerate(prompts)))
    model = reference(directory)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_logprobs(model, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


async def test_late_joiners_do_not_change_the_others(backend: Backend) -> None:
    first = request(PROMPT, 1, temperature=1.0, max_new_tokens=120)
    alone = await backend.decode(first)
    task = asyncio.create_task(backend.decode(first))
    for prompt in ragged_prompts(12, longest=110, seed=3):
        await asyncio.sleep(0.005)
        await backend.decode(request(prompt, max_new_tokens=2))
    assert (await task).token_ids == alone.token_ids


def test_seeded_sampling_is_independent_of_neighbours(backend: Backend) -> None:
    one = request(PROMPT, 7, temperature=1.0, top_p=0.9, top_k=20, repetition_penalty=1.1)
    others = [
        request(p, i, temperature=0.5 * (i % 3), top_p=1 - 0.2 * (i % 2)) for i, p in enumerate(ragged_prompts(9))
    ]
    alone = run(backend, one)[0].token_ids
    crowd = run(backend, *others[:5], one, *others[5:])[5].token_ids
    assert crowd == alone
    assert run(backend, request(PROMPT, 8, temperature=1.0))[0].token_ids != alone


def test_samples_of_one_prompt_follow_their_seeds(backend: Backend) -> None:
    outputs = run(backend, *(request(PROMPT, seed, temperature=1.5) for seed in range(6)))
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    again = run(backend, *(request(PROMPT, seed, temperature=1.5) for seed in reversed(range(6))))
    assert [o.token_ids for o in again[::-1]] == [o.token_ids for o in outputs]


def test_length_ends_a_sequence(backend: Backend) -> None:
    output = run(backend, request(PROMPT, max_new_tokens=9))[0]
    assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (9, "length", None)
    assert output.versions == [0] * 9


def test_the_whole_context_can_be_used(backend: Backend) -> None:
    output = run(backend, request(PROMPT, max_new_tokens=CONTEXT - len(PROMPT)))[0]
    assert output.finish_reason == "length"


def test_a_stop_token_id_ends_a_sequence_and_is_kept(backend: Backend) -> None:
    free = run(backend, request(PROMPT))[0].token_ids
    stop = free[5]
    at = free.index(stop)
    output = run(backend, request(PROMPT, stop_token_ids=(stop,)))[0]
    assert output.token_ids == free[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_end_of_sequence_ends_a_sequence(tmp_path: Path, backend: Backend) -> None:
    free = run(backend, request(PROMPT))[0].token_ids
    directory = save_tiny_model(tmp_path, eos_token_id=free[6])
    with started(directory) as other:
        output = run(other, request(PROMPT))[0]
        assert free[6] in other.facts.eos_token_ids
    assert output.token_ids == free[: free.index(free[6]) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


async def test_a_cancelled_sequence_leaves_and_the_others_go_on(backend: Backend) -> None:
    wanted = request(PROMPT, max_new_tokens=60)
    expected = await backend.decode(wanted)
    report = at_first_report(lambda: [task.cancel() for task in doomed])
    asked = replace(request([0], max_new_tokens=200), eos_token_ids=(), report_every=1, report=report)
    doomed = [asyncio.create_task(backend.decode(replace(asked, prompt_token_ids=(i,)))) for i in range(12)]
    kept = asyncio.create_task(backend.decode(wanted))
    async with asyncio.timeout(HANG_S):
        assert (await kept).token_ids == expected.token_ids
    assert all(task.cancelled() for task in await _settled(doomed))


async def _settled(tasks: list[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        (list(range(CONTEXT)), {}, "the prompt has 256 tokens"),
        (PROMPT, {"max_new_tokens": CONTEXT}, f"use at most {CONTEXT - len(PROMPT)}"),
        ([1, 100_000], {}, "token id 100000 is outside"),
        ([-1], {}, "token id -1 is outside"),
        (PROMPT, {"stop_token_ids": (9999,)}, "stop_token_ids: token id 9999"),
        (PROMPT, {"stop": ("",)}, "empty stop string"),
    ],
)
async def test_a_bad_request_harms_no_neighbour(
    backend: Backend, prompt: list[int], sampling: dict[str, Any], says: str
) -> None:
    good = asyncio.create_task(backend.decode(request(PROMPT)))
    with pytest.raises(RequestError, match=says):
        await backend.decode(request(prompt, **sampling))
    assert (await good).finish_reason == "length"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        SequenceRequest("s", (), SamplingParams())


async def test_an_error_in_the_loop_reaches_everyone_with_its_cause(model_dir: Path) -> None:
    def explode(module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, torch.nn.Embedding):
            raise FloatingPointError("boom")

    backend = _new_backend(model_dir)
    await backend.start()
    hook = register_module_forward_pre_hook(explode)
    try:
        waiting = (backend.decode(request([i])) for i in range(40))
        results = await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        hook.remove()
    assert all(isinstance(error, EngineError) and "boom" in str(error) for error in results)
    with pytest.raises(EngineError, match="boom"):
        await backend.decode(request(PROMPT))
    await backend.close()


def _new_backend(directory: Path) -> HfBackend:
    return HfBackend(ModelConfig(path=str(directory), device="cpu"))


async def test_close_ends_running_sequences_with_an_error(model_dir: Path) -> None:
    backend = _new_backend(model_dir)
    with pytest.raises(EngineError, match="not started"):
        await backend.decode(request(PROMPT))
    await backend.start()
    loop, closing = asyncio.get_running_loop(), list[Future[None]]()

    def report(_: Progress) -> None:
        """Holds the loop's thread until it is told to end."""
        if not closing:
            closing.append(asyncio.run_coroutine_threadsafe(backend.close(), loop))
        while not backend._thread._stopping:
            time.sleep(0.001)

    asked = replace(request(PROMPT, max_new_tokens=240), eos_token_ids=(), report_every=1, report=report)
    with pytest.raises(EngineError, match="closed"):
        await decode_all(backend, [asked] * 40)
    await asyncio.wrap_future(closing[0])
    await backend.close()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "everything"])
async def test_a_directory_that_is_no_model_says_so(tmp_path: Path, missing: str) -> None:
    directory = save_tiny_model(tmp_path / "m")
    if missing == "everything":
        directory = tmp_path / "nowhere"
    else:
        (directory / missing).unlink()
    with pytest.raises(ModelError, match=r"weights|config\.json|no such"):
        await _new_backend(directory).start()


def test_progress_moves_while_idle_and_while_running(backend: Backend) -> None:
    before = backend.progress()
    run(backend, request(PROMPT))
    assert backend.progress() > before


def test_score_is_the_sum_of_logprobs(backend: Backend, plain: Any) -> None:
    expected = reference_logprobs(plain, PROMPT[:1], PROMPT[1:]).sum().item()
    assert asyncio.run(backend.score(PROMPT)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("num_tokens", "says"), [(1, "at least 2 tokens, got 1"), (0, "less than"), (3, "outside")])
def test_what_cannot_be_scored_is_refused_and_the_engine_goes_on(backend: Backend, num_tokens: int, says: str) -> None:
    """Nothing as long as the context, which models with learned positions can't pass."""
    length = num_tokens or backend.facts.context_length
    tokens = [1] * (length - 1) + [backend.facts.vocab_size if says == "outside" else 1]
    with pytest.raises(RequestError, match=says):
        asyncio.run(backend.score(tokens))
    assert math.isfinite(asyncio.run(backend.score(PROMPT)))
