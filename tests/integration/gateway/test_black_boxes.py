"""What agents do with their history, and what is trained: the rows of "Agents as they are" in remote-rollouts.md."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.integration.gateway.harness import USER, Gateway, in_hand, kept, published, said, serving, user
from tests.roles import run_config
from tests.tiny_models import save_tiny_model

SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "rollout_id": "r"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "divide")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    worker = {"lease_s": 30.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 4, "drain_s": 10.0}
    return run_config(broker_config, keys, run_dir, worker=worker, model={"path": str(source)})


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


async def finished(gateway: Gateway, client: Any, keys: Keys, answers: list[Any]) -> list[SequenceResult]:
    """The parts, in which every sampled token is trained once, with its prompt as it was seen."""
    assert (await gateway.finish("r"))[0] == 200
    results = await published(client, keys)
    trained = sum(sum(result.response_mask.expand()) for result in results)
    assert trained == sum(len(answer["token_ids"]) for answer in answers)
    wholes = [list(result.prompt_token_ids) + list(result.token_ids) for result in results]
    for answer in answers:
        assert any(whole[: len(kept(answer))] == kept(answer) for whole in wholes)
    return results


async def test_an_edited_history_is_a_part_of_its_own(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        first = await gateway.chat([USER], **SHORT)
        edited = [USER, {"role": "assistant", "content": "what it should have said"}, user("more")]
        second = await gateway.chat(edited, **SHORT)
        assert second["rollout"]["parent"] == -1
        newest, oldest = await finished(gateway, client, keys, [first, second])
    assert (newest.turn, oldest.turn) == (1, 1)
    assert list(newest.prompt_token_ids) == second["prompt_token_ids"], "what the agent wrote is context"


async def test_a_system_prompt_that_changes_makes_each_turn_a_part(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        history: list[Any] = [USER]
        answers: list[Any] = []
        for turn in range(3):
            answers.append(await gateway.chat([system(f"turn {turn}"), *history], **SHORT))
            history += [said(answers[-1]), user("more")]
        assert len(await finished(gateway, client, keys, answers)) == 3


async def test_tools_in_another_order_are_another_prompt(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        first = await gateway.chat([USER], tools=TOOLS, **SHORT)
        history = [USER, said(first), user("more")]
        second = await gateway.chat(history, tools=TOOLS[::-1], **SHORT)
        third = await gateway.chat(history, tools=TOOLS, **SHORT)
        assert [one["rollout"]["parent"] for one in (first, second, third)] == [-1, -1, 0]
        assert len(await finished(gateway, client, keys, [first, second, third])) == 2


async def test_a_compacted_context_begins_a_part(config: Config, backend: HfBackend, client: Any, keys: Keys) -> None:
    async with serving(config, backend) as gateway:
        first = await gateway.chat([USER], **SHORT)
        second = await gateway.chat([USER, said(first), user("more")], **SHORT)
        summary = [user("so far: hello was said"), user("go on")]
        third = await gateway.chat(summary, **SHORT)
        fourth = await gateway.chat([*summary, said(third), user("and on")], **SHORT)
        assert [one["rollout"]["parent"] for one in (first, second, third, fourth)] == [-1, 0, -1, 2]
        newest, oldest = await finished(gateway, client, keys, [first, second, third, fourth])
    assert (newest.turn, oldest.turn) == (2, 2)


async def test_parallel_agents_under_one_id_are_a_part_each(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async def agent(gateway: Gateway, name: str) -> list[Any]:
        messages: list[Any] = [user(name)]
        answers: list[Any] = []
        for _ in range(2):
            answers.append(await gateway.chat(messages, **SHORT))
            messages += [said(answers[-1]), user("more")]
        return answers

    async with serving(config, backend) as gateway:
        agents = await asyncio.gather(*(agent(gateway, name) for name in ("main", "reader", "writer")))
        results = await finished(gateway, client, keys, [answer for answers in agents for answer in answers])
    assert [(result.turn, result.parts) for result in results] == [(2, 3)] * 3
    assert len({result.group_id for result in results}) == 1


async def test_of_a_stream_that_was_cut_the_repeated_call_is_trained(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    """An agent that goes on from what it has seen begins a part."""
    async with serving(config, backend) as gateway:
        body = {"messages": [USER], **SHORT, "max_tokens": 100}
        async with gateway.http.post(gateway.url + "/v1/chat/completions", json=body | {"stream": True}) as answer:
            await answer.content.readline()
            answer.close()
        await in_hand(gateway, 0)
        again = await gateway.chat(body["messages"], **{**SHORT, "max_tokens": 100})
        cut = {"role": "assistant", "content": said(again)["content"][:5]}
        other = await gateway.chat([USER, cut, user("more")], **SHORT)
        assert (again["rollout"]["turn"], other["rollout"]["parent"]) == (0, -1)
        newest, oldest = await finished(gateway, client, keys, [again, other])
    assert list(oldest.token_ids) == again["token_ids"]
    assert list(newest.prompt_token_ids) == other["prompt_token_ids"]


async def test_a_stream_that_was_complete_before_the_caller_left_is_the_turn(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        body = {"messages": [USER], **SHORT}
        async with gateway.http.post(gateway.url + "/v1/chat/completions", json=body | {"stream": True}) as answer:
            await in_hand(gateway, 0)
            answer.close()  # nothing of it was read
        assert await client.hget(f"{keys.rollout}r", "turns") == b"1"
        again = await gateway.chat([USER], **SHORT)
        assert again["rollout"]["turn"] == 0
        [result] = await finished(gateway, client, keys, [again])
    assert list(result.token_ids) == again["token_ids"]
    assert result.metadata["num_turns"] == 1


async def test_a_turn_has_one_answer(config: Config) -> None:
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"messages": [USER], "n": 2, "rollout_id": "r"}, "n"),
        ("/rollouts/r/v1/chat/completions", {"messages": [USER], "n": 2}, "n"),
        ("/rollouts/r/v1/completions", {"prompt": [5, 6], "n": 2}, "n"),
        ("/rollouts/r/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"n": 2}}, "n"),
    ]
    async with serving(config, None) as gateway:
        for path, body, field in asked:
            status, answer = await gateway.post(path, body)
            assert (status, answer["error"]["param"]) == (400, field)
        assert (await gateway.finish("r"))[0] == 404
