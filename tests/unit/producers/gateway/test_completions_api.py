"""Answers as OpenAI's text completions."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.pipeline.wire.messages import SamplingParams
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from sluice.producers.gateway.answers import Answer
from sluice.producers.gateway.apis.completions import CompletionRequest, Completions
from tests.factories import sequence_result


@pytest.mark.parametrize("count", [0, 1, 200])
def test_each_token_begins_where_the_ones_before_it_end_and_costs_the_same(count: int) -> None:
    measured = 0

    class Name(str):
        def __len__(self) -> int:
            nonlocal measured
            measured += 1
            return super().__len__()

    def name(token: int) -> dict[str, Any]:
        return {"token": Name("é" * (token % 5))}

    decode: Any = lambda tokens: "".join(name(token)["token"] for token in tokens)  # noqa: E731
    tokens, logprobs = TokenArray(range(count)), FloatArray([-1.0] * count)
    result = sequence_result("g", token_ids=tokens, logprobs=logprobs, versions=Runs.of([0] * count))
    request = CompletionRequest(prompt="a", logprobs=0)
    made = Completions(request, SamplingParams(), decode=decode, names=name, name="n").whole(
        [Answer("default", [result], [{"role": "assistant", "content": ""}])]
    )
    lengths = [token % 5 for token in range(count)]
    assert made["choices"][0]["logprobs"]["text_offset"] == [sum(lengths[:place]) for place in range(count)]
    assert measured <= 2 * count
