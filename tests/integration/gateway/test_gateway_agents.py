"""Anthropic's messages and OpenAI's responses over a real broker, worker and HTTP server, by their own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from transformers import AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.integration.gateway.agents import CALLING, agents_config, assert_trajectory
from tests.integration.gateway.harness import USER, Gateway, published, serving, user
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
        base_url=gateway.url + path, api_key="none", default_headers=headers, max_retries=0, timeout=120
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
            assert one.usage.input_tokens + one.usage.cache_read_input_tokens == len(one.prompt_token_ids)
        for name in ("whole", "streamed"):
            assert (await gateway.finish(name))[1]["parts"] == 1, "a turn of it was not recognised"
    results = await published(client, keys)
    assert [result.seq_id for result in results] == ["whole", "streamed"]
    for result in results:
        assert_trajectory(result, TWO_CALLS, codec)


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Call ids name the rollout's turn, which is the same in both; `json` compares numbers as they are written."""
    return json.loads(json.dumps(answer))


OF_OPENAI: list[Any] = [{"type": "function", "name": name, "parameters": NUMBERS, "strict": False} for name in RUN]


async def responses_loop(client: Any, rollout_id: str, *, stream: bool, stored: bool) -> list[Any]:
    """The answers, until one calls no tool: by the stored conversation, or with all items sent again."""
    items: list[Any] = [{"role": "user", "content": TWO_CALLS.prompt}]
    answers: list[Any] = []
    while not answers or answers[-1].output[-1].type == "function_call":
        asked: Any = {"model": "policy", "max_output_tokens": 40, "input": items, "tools": OF_OPENAI}
        if answers and stored:
            asked |= {"previous_response_id": answers[-1].id}
        else:
            asked |= {"store": stored, "extra_headers": {"X-Rollout-Id": rollout_id}}
        if stream:
            async with client.responses.stream(**asked) as events:
                answers.append(await events.get_final_response())
        else:
            answers.append(await client.responses.create(**asked))
        said = answers[-1].output
        results = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": str(RUN[item.name](**json.loads(item.arguments))),
            }
            for item in said
            if item.type == "function_call"
        ]
        items = results if stored else [*items, *(item.to_dict() for item in said), *results]
        assert len(answers) < 6
    return answers


def of_response(answer: Any) -> dict[str, Any]:
    """Without what names the call."""
    whole = answer.to_dict()
    ids = ("id", "created_at", "previous_response_id", "store", "rollout", "logprobs")
    items = [{name: value for name, value in item.items() if name not in ("id", "call_id", "parsed_arguments")}
             for item in whole["output"]]  # fmt: skip
    return {name: value for name, value in whole.items() if name not in ids} | {"output": items}


async def test_responses_are_one_trajectory_stored_or_sent_again_whole_or_streamed(
    config: Config, backend: HfBackend, client: Any, keys: Keys, codec: Any
) -> None:
    ways = {f"{stream:d}{stored:d}": (stream, stored) for stream in (False, True) for stored in (False, True)}
    async with serving(config, backend) as gateway:
        found = {
            name: await responses_loop(gateway.openai, name, stream=stream, stored=stored)
            for name, (stream, stored) in ways.items()
        }
        for answers in found.values():
            assert [one.status for one in answers] == ["completed"] * 3
            assert answers[-1].output_text == TWO_CALLS.answer
            assert [of_response(one)["token_ids"] for one in answers] == [
                of_response(one)["token_ids"] for one in found["00"]
            ]
            for one in answers:
                assert one.usage.output_tokens == len(one.token_ids) == len(one.logprobs)
        for name in ways:
            assert (await gateway.finish(name))[1]["parts"] == 1, "a turn of it was not recognised"
    results = {result.seq_id: result for result in await published(client, keys)}
    assert results.keys() == ways.keys()
    for result in results.values():
        assert_trajectory(result, TWO_CALLS, codec)


async def test_a_stored_conversation_goes_on_at_another_gateway_and_forks(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        openai: Any = gateway.openai
        asked: Any = {"model": "policy", "max_output_tokens": 6}
        first = await openai.responses.create(**asked, input="hello", instructions="Be brief.")
        second = await openai.responses.create(**asked, input="go on", previous_response_id=first.id)
    async with serving(config, backend) as other:
        openai = other.openai
        again = await openai.responses.create(**asked, input="go on", previous_response_id=first.id)
        assert again.id != second.id
        assert again.to_dict()["prompt_token_ids"] == second.to_dict()["prompt_token_ids"]
        text = first.output_text
        chat = await other.chat([user("hello"), {"role": "assistant", "content": text}, user("go on")], max_tokens=6)
        assert chat["prompt_token_ids"] == second.to_dict()["prompt_token_ids"], "instructions are of one call"
        await client.delete(f"{keys.responses}{first.id[5:29]}")
        with pytest.raises(BadRequestError) as gone:
            await openai.responses.create(**asked, input="a", previous_response_id=second.id)
        assert gone.value.code == "previous_response_not_found"


async def test_a_response_is_not_stored_in_another_rollout_or_without_store(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        openai: Any = gateway.openai
        asked: Any = {"model": "policy", "input": "hello", "max_output_tokens": 4}
        first = await openai.responses.create(**asked, extra_body={"rollout_id": "a"})
        repeat = await openai.responses.create(**asked, extra_body={"rollout_id": "a"})
        assert (repeat.id, repeat.output) == (first.id, first.output)
        tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
        free = await openai.responses.create(**asked, tools=tools, extra_body={"rollout_id": "c"})
        forced = await openai.responses.create(
            **asked, tools=tools, tool_choice="required", extra_body={"rollout_id": "c"}
        )
        assert free.id != forced.id, "they are two turns"
        unstored = await openai.responses.create(**asked, store=False)
        for more in (
            {"previous_response_id": first.id, "extra_body": {"rollout_id": "b"}},
            {"previous_response_id": unstored.id},
            {"previous_response_id": "resp_1"},
        ):
            with pytest.raises(BadRequestError):
                await openai.responses.create(**asked, **more)


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
