"""What nobody should send: each is an error of its own, every caller is answered, and the engine goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from sluice.pipeline.errors import EngineError, RequestError
from sluice.pipeline.wire.messages import Progress
from sluice.workers.engine import GenerationOptions, TextGenerationRequest
from sluice.workers.engine.contracts import Backend, SequenceRequest
from tests.contract.engine_fixtures import request
from tests.deadlines import HANG_S

PROMPT = list(b"the abc of it")


def fail(_piece: Progress) -> None:
    raise KeyError("nobody listens")


ODD: dict[str, SequenceRequest] = {
    "eos is no list": replace(request(PROMPT), eos_token_ids=2),  # type: ignore[arg-type]
    "tokens are text": replace(request(PROMPT), prompt_token_ids=("a", "b")),  # type: ignore[arg-type]
    "tokens are fractions": replace(request(PROMPT), prompt_token_ids=(1.5, 2)),  # type: ignore[arg-type]
    "pad outside the vocabulary": replace(request(PROMPT), pad_token_id=100_000),
    "a report that fails": replace(request(PROMPT), report_every=2, report=fail),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_an_odd_request_is_answered_with_its_error_alone(backend: Backend, odd: SequenceRequest) -> None:
    beside = asyncio.create_task(backend.decode(request(PROMPT)))
    with pytest.raises(EngineError):
        await asyncio.wait_for(backend.decode(odd), HANG_S)
    assert (await asyncio.wait_for(beside, HANG_S)).finish_reason == "length"
    assert (await asyncio.wait_for(backend.decode(request(PROMPT)), HANG_S)).finish_reason == "length"


async def test_the_context_is_padded_with_any_token_of_the_vocabulary(backend: Backend) -> None:
    plain = await backend.decode(request(PROMPT))
    padded = [replace(request(prompt), pad_token_id=7) for prompt in (PROMPT, PROMPT * 3)]
    outputs = await asyncio.gather(*map(backend.decode, padded))
    assert outputs[0].token_ids == plain.token_ids


async def test_aborting_what_is_whole_already_gives_the_whole(backend: Backend) -> None:
    whole = await backend.decode(request(PROMPT, max_new_tokens=5))
    so_far = whole.sampled
    asked = replace(request(PROMPT, max_new_tokens=5), seq_key="whole", so_far=so_far)
    task = asyncio.create_task(backend.decode(asked))
    await asyncio.sleep(0)
    backend.abort("whole")
    assert (await asyncio.wait_for(task, HANG_S)).finish_reason == "length"


@pytest.mark.parametrize("options", [{"eos_token_ids": 2}, {"pad_token_id": "x"}, {"eos_token_ids": ("a",)}])
def test_overrides_of_a_wrong_type_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="eos_token_ids or pad_token_id"):
        GenerationOptions(**options)


def test_token_ids_of_a_prompt_are_whole_numbers_of_any_kind() -> None:
    import numpy as np

    assert TextGenerationRequest(prompt_token_ids=tuple(np.array([3, 4]))).prompt_token_ids == (3, 4)
    with pytest.raises(RequestError, match="prompt_token_ids must be integers"):
        TextGenerationRequest(prompt_token_ids=("a",))  # type: ignore[arg-type]
