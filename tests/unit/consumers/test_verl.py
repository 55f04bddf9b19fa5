"""What verl gets of a gateway's answer; two classes of verl stand in, and its own loops run in tests/clients."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.pipeline.wire.messages import SamplingParams, SequenceResult
from sluice.pipeline.wire.tokens import FloatArray, Runs
from sluice.producers.gateway.answers import Answer
from sluice.producers.gateway.apis.tokens import Generated, GenerateRequest
from tests.factories import sequence_result

ADAPTER = "sluice.consumers.adapters.verl"


class Client:
    """verl's, as far as ours asks it."""

    def __init__(self, config: Any) -> None:
        self.config = config


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    rollout = "verl.workers.rollout"
    monkeypatch.setitem(sys.modules, f"{rollout}.llm_server", SimpleNamespace(LLMServerClient=Client))
    monkeypatch.setitem(sys.modules, f"{rollout}.replica", SimpleNamespace(TokenOutput=SimpleNamespace))
    yield import_module(ADAPTER)
    del sys.modules[ADAPTER]


async def answer_of(adapter: Any, monkeypatch: pytest.MonkeyPatch, decoded: SequenceResult) -> Any:
    """What `generate` makes of the gateway's body."""
    rollout = SimpleNamespace(response_length=8, prompt_length=8)
    client = adapter.GatewayClient(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), "http://x")

    async def ask(_: str, body: dict[str, Any]) -> bytes:
        made = Generated(GenerateRequest.model_validate(body), SamplingParams(), request_id="r")
        return json.dumps(made.whole(Answer("m", [decoded], []))).encode()

    monkeypatch.setattr(client, "_ask", ask)
    return await client.generate("r", prompt_ids=[5, 6], sampling_params={"temperature": 1, "logprobs": True})


def result(versions: list[int]) -> SequenceResult:
    """Three tokens, logprobs of those that a version sampled."""
    logprobs = FloatArray([-0.5 if version >= 0 else 0.0 for version in versions])
    mask = Runs.of([int(version >= 0) for version in versions])
    return sequence_result("r", versions=Runs.of(versions), logprobs=logprobs, response_mask=mask)


async def test_an_answer_with_the_versions_that_sampled_it(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    got = await answer_of(adapter, monkeypatch, result([3, 3, 4]))
    assert (got.token_ids, got.log_probs) == ([7, 8, 9], [-0.5] * 3)
    assert got.extra_fields == {"global_steps": 4, "min_global_steps": 3, "max_global_steps": 4}


async def test_the_end_that_the_repeat_guard_forced_is_not_given(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl would train on it, by a logprob of 0."""
    got = await answer_of(adapter, monkeypatch, result([3, 4, -1]))
    assert (got.token_ids, got.log_probs) == ([7, 8], [-0.5] * 2)
    assert got.extra_fields == {"global_steps": 4, "min_global_steps": 3, "max_global_steps": 4}
