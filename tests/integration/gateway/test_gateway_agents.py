"""Anthropic's messages over a real broker, worker and HTTP server, by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.integration.gateway.agents import CALLING, agents_config, assert_trajectory
from tests.integration.gateway.harness import USER, Gateway, published, serving
from tests.tool_models import tool_model

TWO_CALLS = CALLING[0]
RUN: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a // b,
}
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
OF_ANTHROPIC: list[Any] = [{"name": name, "description": name, "input_schema": NUMBERS} for name in RUN]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def codec(source: Path) -> Any:
    return AutoTokenizer.from_pretrained(source)


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    return agents_config(broker_config, keys, run_dir, source)


def anthropic_client(gateway: Gateway, path: str = "", **headers: str) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.AsyncAnthropic(
        base_url=gateway.url + path, api_key="none", default_headers=headers, max_retries=0, timeout=30
    )


async def messages_loop(client: Any, *, stream: bool) -> list[Any]:
    """The answers, until one calls no tool; what the client returned is what it is sent."""
    messages: list[Any] = [{"role": "user", "content": TWO_CALLS.prompt}]
    answers: list[Any] = []
    while not answers or answers[-1].stop_reason == "tool_use":
        asked: Any = {"model": "policy", "max_tokens": 40, "messages": messages, "tools": OF_ANTHROPIC}
        if stream:
            async with client.messages.stream(**asked) as events:
                answers.append(await events.get_final_message())
        else:
            answers.append(await client.messages.create(**asked))
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(RUN[block.name](**block.input))}
            for block in answers[-1].content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": answers[-1].content}, {"role": "user", "content": results}]
        assert len(answers) < 6
    return answers


def of_message(answer: Any) -> dict[str, Any]:
    return {name: value for name, value in answer.to_dict().items() if name in ("content", "stop_reason", "usage")}


async def test_an_anthropic_tool_loop_is_one_trajectory_whole_and_streamed(
    config: Config, backend: HfBackend, client: Any, keys: Keys, codec: Any
) -> None:
    async with serving(config, backend) as gateway:
        async with anthropic_client(gateway, **{"X-Rollout-Id": "whole"}) as whole:
            answers = await messages_loop(whole, stream=False)
        async with anthropic_client(gateway, "/rollouts/streamed") as streamed:
            others = await messages_loop(streamed, stream=True)
        assert [one.stop_reason for one in answers] == ["tool_use", "tool_use", "end_turn"]
        assert [one.content[-1].text for one in (answers[-1], others[-1])] == [TWO_CALLS.answer] * 2
        for one, other in zip(answers, others, strict=True):
            assert of_message(one).keys() == {"content", "stop_reason", "usage"}
            assert without_ids(of_message(one)) == without_ids(of_message(other))
            assert one.usage.output_tokens == len(one.token_ids) == len(one.logprobs)
            assert one.usage.input_tokens == len(one.prompt_token_ids)
        for name in ("whole", "streamed"):
            assert (await gateway.finish(name))[1]["parts"] == 1, "a turn of it was not recognised"
    results = await published(client, keys)
    assert [result.seq_id for result in results] == ["whole", "streamed"]
    for result in results:
        assert_trajectory(result, TWO_CALLS, codec)


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Call ids name the rollout's turn, which is the same in both; `json` compares numbers as they are written."""
    return json.loads(json.dumps(answer))


async def test_a_message_and_a_chat_of_one_rollout_are_turns_of_each_other(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        first = await gateway.chat([USER], rollout_id="r", max_tokens=8)
        said = first["choices"][0]["message"]["content"]
        history = [USER, {"role": "assistant", "content": [{"type": "text", "text": said}]}, USER]
        body = {"model": "default", "max_tokens": 8, "messages": history}
        status, second = await gateway.post("/rollouts/r/v1/messages", body)
        assert status == 200, second
        assert (second["rollout"]["turn"], second["rollout"]["parent"]) == (1, 0)
        known = first["prompt_token_ids"] + first["token_ids"]
        assert second["prompt_token_ids"][: len(known)] == known


async def test_tokens_are_counted_as_they_are_rendered(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway, anthropic_client(gateway) as client:
        asked: Any = {"model": "policy", "messages": [USER], "system": "Be brief.", "tools": OF_ANTHROPIC}
        count = await client.messages.count_tokens(**asked)
        answer = await client.messages.create(max_tokens=2, **asked)
        assert count.input_tokens == answer.usage.input_tokens


async def test_errors_have_the_form_of_the_api(config: Config) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with serving(config, None) as gateway, anthropic_client(gateway) as client:
        asked: Any = {"model": "policy", "max_tokens": 4, "messages": [USER]}
        for wrong, kind, status, path in (
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, anthropic.BadRequestError, 400, "thinking"),
            ({"model": "gpt"}, anthropic.NotFoundError, 404, "model"),
            ({"extra_body": {"temperature": 5}}, anthropic.UnprocessableEntityError, 422, "temperature"),
        ):
            with pytest.raises(kind) as refused:
                await client.messages.create(**asked | wrong)
            assert refused.value.status_code == status
            body = refused.value.body
            assert (body["type"], body["error"]["param"]) == ("error", path)
            assert body["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
        async with gateway.http.post(gateway.url + "/v1/messages", data="no json") as answer:
            assert answer.status == 415
            assert (await answer.json())["type"] == "error"
