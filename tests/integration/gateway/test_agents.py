"""Agents that are not ours, and our own rollout server, over a gateway and a worker with a model that calls tools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from transformers import AutoTokenizer

from sluice.pipeline.config.types import BrokerConfig, Config, RolloutServerConfig
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult
from sluice.producers.agents.tools import load_tools
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import reference, reference_logprobs, started
from tests.integration.gateway.agents import (
    CALLING,
    GREEDY,
    agents_config,
    assert_completed,
    assert_trajectory,
    called,
    expected_calls,
    rollout_server,
)
from tests.integration.gateway.harness import Gateway, published, serving, user
from tests.roles import eventually
from tests.tool_models import tool_model

TWO_CALLS = CALLING[0]
SETTINGS = RolloutServerConfig(tool_latency_ms=(0, 5))
TOOLS = load_tools(SETTINGS)


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
    return agents_config(broker_config, keys, run_dir, source, rollout_server=SETTINGS)


async def asked(client: AsyncOpenAI, stream: bool, **options: Any) -> ChatCompletion:
    """One answer, put together by the client itself where it streams; but our own fields it leaves in the chunks."""
    if not stream:
        return await client.chat.completions.create(**options)
    chunks = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    state: Any = ChatCompletionStreamState()
    more: dict[str, Any] = {}
    async for chunk in chunks:
        state.handle_chunk(chunk)
        more |= chunk.model_extra or {}
    return ChatCompletion.model_validate(state.get_final_completion().to_dict() | more)


async def tool_loop(gateway: Gateway, rollout_id: str, stream: bool) -> list[ChatCompletion]:
    """What a user writes: ask, run the tools, ask again until no tool is called."""
    messages: list[Any] = [user(TWO_CALLS.prompt)]
    answers: list[ChatCompletion] = []
    while len(answers) < 4:
        options = {"model": "policy", "messages": messages, "tools": TOOLS.schemas(), **GREEDY}
        answers.append(await asked(gateway.openai, stream, **options, extra_body={"rollout_id": rollout_id}))
        message = answers[-1].choices[0].message.to_dict()
        messages.append(message)
        if not message.get("tool_calls"):
            break
        messages += await TOOLS.run(message["tool_calls"])  # type: ignore[arg-type]
    assert called(messages) == expected_calls(TWO_CALLS)
    return answers


async def test_a_hand_written_tool_loop_by_the_openai_client_streams_what_it_is_answered_whole(
    config: Config, backend: HfBackend
) -> None:
    async with serving(config, backend) as gateway:
        whole = await tool_loop(gateway, "whole", stream=False)
        streamed = await tool_loop(gateway, "streamed", stream=True)
    assert [one.choices[0].finish_reason for one in whole] == ["tool_calls", "tool_calls", "stop"]
    assert whole[-1].choices[0].message.content == TWO_CALLS.answer
    known: list[int] = []
    for one, other in zip(whole, streamed, strict=True):
        assert plain(one) == plain(other)
        prompt, sampled = extra(one, "prompt_token_ids"), extra(one, "token_ids")
        assert (prompt[: len(known)], bool(sampled)) == (known, True)
        assert one.usage
        assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (len(prompt), len(sampled))
        assert len(extra(one, "logprobs")) == len(sampled)
        known = prompt + sampled


def plain(answer: ChatCompletion) -> dict[str, Any]:
    """All that does not name the one call; what the client adds where it puts a message together is left out."""
    [choice] = answer.choices
    calls: list[Any] = choice.message.to_dict().get("tool_calls") or []  # type: ignore[assignment]
    return {
        **{name: extra(answer, name) for name in ("prompt_token_ids", "token_ids", "logprobs")},
        "content": choice.message.content or None,
        "calls": [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in calls],
        "finish_reason": choice.finish_reason,
        "usage": answer.usage and answer.usage.to_dict(),
    }


def extra(answer: ChatCompletion, name: str) -> list[Any]:
    """A field that OpenAI does not know, as its client gives it."""
    return [round(value, 4) for value in getattr(answer, name)]


def third_party_agent(gateway: Gateway, rollout_id: str) -> Agent:
    """As its manual says, with tools of its own; nothing in it knows of rollouts but a header."""
    headers = {"X-Rollout-Id": rollout_id}
    client = AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", default_headers=headers, max_retries=0, timeout=120
    )
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    agent = Agent(model)

    @agent.tool_plain
    def multiply(a: int, b: int) -> int:
        """a * b."""
        return a * b

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """a + b."""
        return a + b

    @agent.tool_plain
    def subtract(a: int, b: int) -> int:
        """a - b."""
        return a - b

    @agent.tool_plain
    def divide(a: int, b: int) -> int:
        """a / b."""
        return a // b

    return agent


async def test_a_third_party_agent_loop_becomes_one_trajectory(
    config: Config, backend: HfBackend, client: Any, keys: Keys, source: Path, codec: Any
) -> None:
    async with serving(config, backend) as gateway:
        run = await third_party_agent(gateway, "whole").run(TWO_CALLS.prompt)
        async with third_party_agent(gateway, "streamed").run_stream(TWO_CALLS.prompt) as streamed:
            assert [run.output, await streamed.get_output()] == [TWO_CALLS.answer] * 2
        for name in ("whole", "streamed"):
            assert (await gateway.finish(name))[1]["parts"] == 1, "a turn of it was not recognised"
    results = await published(client, keys)
    assert [result.seq_id for result in results] == ["whole", "streamed"]
    for result in results:
        assert_trajectory(result, TWO_CALLS, codec)
        assert set(result.versions.expand()) == {-1, 0}
        assert_true_logprobs(result, reference(source))


def assert_true_logprobs(result: SequenceResult, model: Any) -> None:
    """Every sampled token of every turn has the logprob that one plain forward pass over the whole gives it."""
    true = reference_logprobs(model, list(result.prompt_token_ids), list(result.token_ids))
    mask = torch.tensor(result.response_mask.expand())
    given = torch.tensor(list(result.logprobs))
    assert (given - true * mask).abs().max() < 1e-4


async def test_the_rollout_server_and_the_gateway_do_both_protocols(
    config: Config, backend: HfBackend, client: Any, keys: Keys, codec: Any
) -> None:
    async with serving(config, backend) as gateway, rollout_server(config, gateway.url) as server:
        posts = [server.post("/rollout", f"sync-{at}", one.prompt) for at, one in enumerate(CALLING)]
        for answer, one in zip(await asyncio.gather(*posts), CALLING, strict=True):
            assert_completed(answer, one)
        hint = {"max_assistant_turns": 1}
        short = await server.post("/rollout", "hint", TWO_CALLS.prompt, metadata=hint)
        assert (short["finish_reason"], short["metrics"]["num_llm_calls"]) == ("max_turns", 1)
        begun = await server.post("/v1/rollout/init", "async", TWO_CALLS.prompt)
        assert (begun["rollout_id"], len(begun["tools"])) == ("async", 4)

        async def delivered() -> bool:
            return 'sluice_rollout_callbacks_total{outcome="delivered"} 1.0' in await server.text("/metrics")

        await eventually(delivered, "the answer to be called back")
        assert '"success"' in await server.text("/rollout/async/status")
        finishes = await server.text("/metrics")
        assert f'sluice_rollout_finishes_total{{outcome="told"}} {len(CALLING) + 2}.0' in finishes
    results = {result.seq_id: result for result in await published(client, keys)}
    assert len(results) == len(CALLING) + 2
    for at, one in enumerate(CALLING):
        assert_trajectory(results[f"sync-{at}"], one, codec)
    assert_trajectory(results["async"], TWO_CALLS, codec)
    assert (results["hint"].turn, set(results["hint"].response_mask.expand())) == (1, {1})
    assert await client.xlen(keys.results + "0") == len(results), "each is published once"
