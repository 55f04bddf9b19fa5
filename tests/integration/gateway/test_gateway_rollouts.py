"""How a rollout is named, opened, repeated and rewarded, over a real broker, worker and HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from openai import AsyncOpenAI

from sluice.pipeline.config.types import BrokerConfig, Config, PolicyConfig
from sluice.pipeline.queue.trained import LEDGER, TrainedIds
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.integration.gateway.harness import USER, published, said, serving, user
from tests.roles import run_config
from tests.tiny_models import CONTEXT, save_tiny_model

SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}


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


@pytest.mark.parametrize("rollout_id", ["plain", "u/1 ü:v1/x"])
async def test_a_base_url_is_enough(
    config: Config, backend: HfBackend, client: Any, keys: Keys, rollout_id: str
) -> None:
    async with serving(config, backend) as gateway:
        url = f"{gateway.url}/rollouts/{quote(rollout_id, safe='')}/v1"
        agent = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        messages: list[Any] = [USER]
        for _ in range(2):
            answer: Any = await agent.chat.completions.create(model="policy", messages=messages, **SHORT)
            assert answer.rollout["id"] == rollout_id
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user("more")]
        models: list[Any] = (await agent.models.list()).data
        assert [(one.id, one.max_model_len) for one in models] == [("default", CONTEXT), ("policy", CONTEXT)]
        assert (await agent.models.retrieve("policy")).id == "policy"
        await agent.close()
        same = f"/v1/rollouts/{quote(rollout_id, safe='')}/chat/completions"
        status, body = await gateway.post(same, {"model": "policy", "messages": [USER], **SHORT})
        assert (status, body["rollout"]["turn"]) == (200, 0), "the first call, repeated"
        path = f"/rollouts/{quote(rollout_id, safe='')}/v1/chat/completions"
        status, body = await gateway.post(path, {"messages": [USER], "rollout_id": "other"})
        assert (status, body["error"]["param"]) == (400, "rollout_id")
        status, body = await gateway.post(path, {"messages": [USER]}, **{"X-Rollout-Id": "other"})
        assert (status, body["error"]["param"]) == (400, "rollout_id")
        assert (await gateway.finish(quote(rollout_id, safe="")))[1]["num_turns"] == 2
    [result] = await published(client, keys)
    assert result.rollout_id == rollout_id


async def test_a_rollout_is_opened_with_its_group_and_finished_with_named_rewards(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    policy = msgspec.structs.replace(config, policy=PolicyConfig(enabled=True, advantage="group_norm"))
    async with serving(policy, backend) as gateway:
        group = {"group_id": "g", "group_size": 2, "truth": "1714", "metadata": {"row": 7}}
        for index in range(2):
            body = {**group, "rollout_id": f"g:{index}", "index": index}
            expected = {"rollout_id": f"g:{index}", "already": False, "base_path": f"/rollouts/g%3A{index}/v1"}
            assert await gateway.post("/v1/rollouts", body) == (200, expected)
            assert (await gateway.post("/v1/rollouts", body))[1]["already"] is True
            status, answer = await gateway.post(
                expected["base_path"] + "/chat/completions", {"messages": [USER], **SHORT}
            )
            assert (status, answer["rollout"]["id"]) == (200, f"g:{index}")
        assert (await gateway.finish("g:0", rewards={"right": 1.0, "short": 0.5}))[0] == 200
        assert (await gateway.finish("g:1", reward=0.25, rewards={"right": 1.0}))[0] == 200
        status, body = await gateway.finish("g:1", rewards={"a": 1e308, "b": 1e308})
        assert (status, body["error"]["param"]) == (400, "rewards")
        status, body = await gateway.finish("g:1", score=1.0)
        assert (status, body["error"]["param"]) == (400, "score")
        assert (await gateway.post("/v1/rollouts", {**group, "rollout_id": "g:0"}))[0] == 409
        made = (await gateway.post("/v1/rollouts", group))[1]
        assert made["rollout_id"]
        for wrong, param in (
            ({}, "group_size"),
            ({"group_size": 2}, "group_id"),
            ({**group, "index": 2}, "index"),
            ({**group, "rollout_id": " "}, "rollout_id"),
            ({**group, "task": "other"}, "task"),
            ({**group, "reward": 1}, "reward"),
        ):
            status, body = await gateway.post("/v1/rollouts", wrong)
            assert (status, body["error"]["param"]) == (400, param), body
        status, body = await gateway.post("/v1/rollouts", {})
        assert "policy.advantage group_norm compares the rollouts of a group" in body["error"]["message"]
    one, two = await published(client, keys)
    assert [(one.group_id, one.group_size, one.index, one.truth) for one in (one, two)] == [
        ("g", 2, 0, "1714"),
        ("g", 2, 1, "1714"),
    ]
    assert (one.reward, one.metadata["rewards"], one.metadata["row"]) == (1.5, {"right": 1.0, "short": 0.5}, 7)
    assert (two.reward, two.metadata["rewards"]) == (0.25, {"right": 1.0})


async def test_an_id_that_the_run_has_trained_opens_no_other_rollout(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    """The trainer would leave it out, an hour after the broker has forgotten the first one."""
    run = Path(config.run_dir) / config.run
    run.mkdir(parents=True, exist_ok=True)
    (run / LEDGER).write_bytes(msgspec.json.encode({"step": 1, "seq_ids": ["mine"]}) + b"\n")
    known = TrainedIds(run)
    known.open(1)
    known.durable(1)
    async with serving(config, backend) as gateway:
        for path, body in (
            ("/v1/rollouts", {"rollout_id": "mine"}),
            ("/rollouts/mine/v1/chat/completions", {"messages": [USER], **SHORT}),
        ):
            status, answer = await gateway.post(path, body)
            assert (status, answer["error"]["param"]) == (409, "rollout_id"), answer
            assert "trains an id once" in answer["error"]["message"]
        status, answer = await gateway.post("/v1/rollouts", {"rollout_id": "other"})
        assert (status, answer["already"]) == (200, False)
    known.close()
    assert (await snapshot(client, keys)).enqueued == 1


async def test_the_reward_of_a_rollout_servers_callback_is_the_rollouts(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        await gateway.chat([USER], rollout_id="back", **SHORT)
        callback = {"rollout_id": "back", "status": "COMPLETED", "reward": 0.75}
        assert (await gateway.post("/v1/rollout/completed", callback))[1]["outcome"] == "published"
    [result] = await published(client, keys)
    assert result.reward == 0.75


async def test_a_call_repeated_with_its_idempotency_key_gets_the_same_answer(
    config: Config, backend: HfBackend
) -> None:
    async with serving(config, backend) as gateway:
        body = {"messages": [USER], "n": 2, **SHORT}
        key = {"Idempotency-Key": "k-1"}
        calls = [gateway.post("/v1/chat/completions", body, **key) for _ in range(3)]
        answers = [*await asyncio.gather(*calls), await gateway.post("/v1/chat/completions", body, **key)]
        tokens = [[choice["token_ids"] for choice in answer["choices"]] for _, answer in answers]
        assert tokens == [tokens[0]] * 4
        assert tokens[0][0] != tokens[0][1], "two samples"
        _, other = await gateway.post("/v1/chat/completions", body, **{"Idempotency-Key": "k-2"})
        assert [choice["token_ids"] for choice in other["choices"]] != tokens[0], "a key of its own, tokens of its own"
        hello: Any = [USER]
        for streams in (False, True):
            wrong = {"messages": [USER, USER], "n": 2, "stream": streams, **SHORT}
            status, refused = await gateway.post("/v1/chat/completions", wrong, **key)
            assert (status, refused["error"]["code"]) == (400, "idempotency_error"), "nothing of the other is shown"
        stream = await gateway.openai.chat.completions.create(
            model="default",
            messages=hello,
            n=2,
            stream=True,
            extra_headers=key,
            **SHORT,
        )
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice["message"]["content"] for choice in answers[0][1]["choices"]]
        status, refused = await gateway.post("/v1/chat/completions", {**body, "temperature": 0.5}, **key)
        assert (status, refused["error"]["code"]) == (400, "idempotency_error")
        assert said(answers[0][1])["role"] == "assistant"
