"""The gateway over a real broker, a real worker and a real HTTP server, asked by OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from sluice.pipeline.config.types import BrokerConfig, Config, GatewayConfig
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import ARQ_ABORT, Keys
from sluice.producers.gateway.parsers import Call, Parsed
from sluice.producers.tokenizer import load_renderer
from sluice.workers.engine.hf import HfBackend
from tests.clock import LIMIT_S, skip
from tests.contract.engine_fixtures import started
from tests.integration.gateway.harness import USER, in_hand, kept, published, said, serving, user
from tests.roles import eventually, run_config
from tests.tiny_models import SPECIALS, save_tiny_model

SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


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


def with_gateway(config: Config, **changes: Any) -> Config:
    return msgspec.structs.replace(config, gateway=GatewayConfig(**changes))


def call_in_every_text(text: str) -> Parsed:
    """A tool parser for a model that writes no calls."""
    return Parsed("", [Call("add", msgspec.json.encode({"text": text}).decode())])


def calls_in_every_text(text: str) -> Parsed:
    call = call_in_every_text(text).calls[0]
    return Parsed("", [call, call])


async def test_the_openai_client_is_answered_whole_and_in_a_stream(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        messages: Any = [USER]
        options: dict[str, Any] = {"model": "default", "messages": messages, "seed": 3, "max_tokens": 24}
        whole = await gateway.openai.chat.completions.create(**options, n=2, logprobs=True)
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert whole.usage
        assert whole.usage.completion_tokens == sum(
            len(choice.logprobs.content or []) for choice in whole.choices if choice.logprobs
        )
        for choice in whole.choices:
            entries = (choice.logprobs and choice.logprobs.content) or []
            text = bytes(byte for entry in entries for byte in entry.bytes or []).decode(errors="replace")
            for special in SPECIALS:
                text = text.replace(special, "")
            assert (choice.message.content or "") in text, "the tokens' bytes are the text's"
        stream = await gateway.openai.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        last: Any = chunks[-2]
        assert last.choices[0].finish_reason in ("stop", "length")
        assert last.logprobs is None, "nobody asked for them"
        usage = chunks[-1].usage
        assert usage
        assert usage.prompt_tokens == len(last.prompt_token_ids)
        assert [one.id for one in (await gateway.openai.models.list()).data] == ["default", "policy"]
        assert len({chunk.id for chunk in chunks}) == 1
        tokenizer = load_renderer(config.model.path).tokenizer
        assert text == tokenizer.decode(last.token_ids, skip_special_tokens=True).strip()


async def test_sampled_tokens_are_never_made_again_and_a_rollout_is_published_once(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        first = await gateway.chat([USER], rollout_id="r/1", **SHORT)
        more = [USER, said(first), user("more")]
        second = await gateway.chat(more, rollout_id="r/1", **SHORT)
        added = second["prompt_token_ids"][len(kept(first)) :]
        assert second["prompt_token_ids"] == kept(first) + added
        assert added
        assert (second["rollout"]["parent"], second["rollout"]["turn"]) == (0, 1)
        assert await gateway.finish("r/1", reward=0.5, truth="t") == (
            200,
            {"rollout_id": "r/1", "already": False, "outcome": "published", "num_turns": 2, "parts": 1},
        )
        assert (await gateway.finish("r/1"))[1]["already"] is True
        callback = {"rollout_id": "r/1", "status": "COMPLETED"}
        assert (await gateway.post("/v1/rollout/completed", callback))[1]["already"] is True
        assert (await gateway.finish("r/2"))[0] == 404
        late = {"messages": [*more, said(second), user("late")], "rollout_id": "r/1"}
        async with gateway.http.post(gateway.url + "/v1/chat/completions", json=late) as refused:
            assert (refused.status, refused.headers["x-should-retry"]) == (409, "false")
    [result] = await published(client, keys)
    assert list(result.prompt_token_ids) == first["prompt_token_ids"]
    assert list(result.token_ids) == first["token_ids"] + added + second["token_ids"]
    mask = [1] * len(first["token_ids"]) + [0] * len(added) + [1] * len(second["token_ids"])
    assert result.response_mask.expand() == mask
    assert list(result.logprobs) == first["logprobs"] + [0.0] * len(added) + second["logprobs"]
    assert (result.seq_id, result.turn, result.reward, result.truth) == ("r/1", 2, 0.5, "t")
    assert (result.text, result.metadata["num_turns"]) == (said(second)["content"], 2)
    now = await snapshot(client, keys)
    assert (now.enqueued, now.committed, now.dead, now.queued_jobs) == (1, 1, 0, 0), "its turns are no results"


async def test_a_mask_of_the_wrong_length_is_refused_and_a_history_that_forks_has_two_parts(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        bad = {"messages": [USER], "rollout_id": "none", "response_mask": [0], **SHORT}
        status, _ = await gateway.post("/v1/chat/completions", bad)
        assert (status, (await gateway.finish("none"))[0]) == (400, 404), "what is refused opens no rollout"
        first = await gateway.chat([USER], rollout_id="f", response_mask=None, **SHORT)
        more: dict[str, Any] = {"messages": [USER, said(first), user("more")], "rollout_id": "f", **SHORT}
        status, body = await gateway.post("/v1/chat/completions", {**more, "response_mask": [0]})
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, "response_mask", "mask_error")
        length = int(body["error"]["message"].split(" has ")[2].split()[0])
        assert "response_mask has 1 values" in body["error"]["message"]
        status, body = await gateway.post("/v1/chat/completions", {**more, "response_mask": [0] * (length - 1) + [1]})
        assert (status, body["error"]["code"]) == (400, "mask_error")
        left = await gateway.chat(**{**more, "response_mask": [0] * length})
        assert len(left["prompt_token_ids"]) == len(kept(first)) + length
        right = await gateway.chat([USER, said(first), user("other")], rollout_id="f", **SHORT)
        assert right["rollout"]["parent"] == left["rollout"]["parent"] == 0
        assert (await gateway.finish("f"))[1]["parts"] == 2
    one, two = await published(client, keys)
    assert [(result.seq_id, result.part, result.parts) for result in (one, two)] == [("f", 0, 2), ("f/1", 1, 2)]
    shared = len(first["token_ids"])
    assert one.response_mask.expand()[:shared] == [1] * shared
    assert two.response_mask.expand()[:shared] == [0] * shared
    assert list(one.token_ids)[-len(right["token_ids"]) :] == right["token_ids"], "the newest branch is the first part"
    assert list(two.token_ids)[-len(left["token_ids"]) :] == left["token_ids"]


async def test_a_repeated_call_is_the_same_turn(config: Config, backend: HfBackend, client: Any, keys: Keys) -> None:
    async with serving(config, backend) as gateway:
        hello: Any = [USER]
        calls = [gateway.chat(hello, rollout_id="same", **SHORT) for _ in range(3)]
        answers = [*await asyncio.gather(*calls), await gateway.chat([USER], rollout_id="same", **SHORT)]
        assert len({msgspec.json.encode([one["token_ids"], said(one)]) for one in answers}) == 1
        stream = await gateway.openai.chat.completions.create(
            model="policy", messages=hello, stream=True, extra_headers={"X-Rollout-Id": "same"}, **SHORT
        )
        chunks: list[Any] = [chunk async for chunk in stream]
        assert chunks[-1].token_ids == answers[0]["token_ids"]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said(answers[0])["content"]
        assert (await gateway.finish("same"))[1]["num_turns"] == 1
        assert (await gateway.chat([USER], rollout_id="dropped", **SHORT))["rollout"]["turn"] == 0
        assert (await gateway.finish("dropped", "ERROR"))[1]["reason"] == "rollout_error"
    assert len(await published(client, keys)) == 1


async def test_tool_calls_go_out_and_their_answers_come_back_as_context(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    parser = f"{__name__}:call_in_every_text"
    async with serving(with_gateway(config, tool_parser=parser), backend) as gateway:
        options: dict[str, Any] = {"tools": TOOLS, "model": "default", "extra_body": {"rollout_id": "tools"}, **SHORT}
        hello: Any = [USER]
        first = await gateway.openai.chat.completions.create(messages=hello, **options)
        assert first.choices[0].finish_reason in ("tool_calls", "length")
        [call] = first.choices[0].message.tool_calls or []
        answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        history: Any = [USER, first.choices[0].message.model_dump(), answer]
        stream = await gateway.openai.chat.completions.create(messages=history, stream=True, **options)
        chunks: list[Any] = [chunk async for chunk in stream]
        calls = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        assert [part.function.name for part in calls] == ["add"]
        assert calls[0].id != call.id
        assert chunks[-1].rollout["parent"] == 0
        assert not any(chunk.choices[0].delta.content for chunk in chunks), "a call is no content"
        none = await gateway.chat([USER], tools=TOOLS, tool_choice="none", **SHORT)
        assert "tool_calls" not in said(none)
        again = await gateway.chat([USER], tools=TOOLS, rollout_id="tools", **SHORT)
        text = await gateway.chat([USER], tools=TOOLS, tool_choice="none", rollout_id="tools", **SHORT)
        assert (again["rollout"]["turn"], text["rollout"]["turn"]) == (0, 2)
        assert "tool_calls" not in said(text)


async def test_without_parallel_calls_the_first_is_the_answer_and_the_tokens_are_all_that_was_sampled(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(with_gateway(config, tool_parser=f"{__name__}:calls_in_every_text"), backend) as gateway:
        options: dict[str, Any] = {"tools": TOOLS, "seed": 3, **SHORT}
        both = await gateway.chat([USER], **options)
        assert len(said(both)["tool_calls"]) == 2
        first = await gateway.chat([USER], rollout_id="one", parallel_tool_calls=False, **options)
        assert [call["function"] for call in said(first)["tool_calls"]] == [said(both)["tool_calls"][0]["function"]]
        assert first["token_ids"] == both["token_ids"]
        answer = {"role": "tool", "tool_call_id": said(first)["tool_calls"][0]["id"], "content": "3"}
        second = await gateway.chat([USER, said(first), answer], rollout_id="one", parallel_tool_calls=False, **options)
        assert (second["rollout"]["parent"], len(said(second)["tool_calls"])) == (0, 1)
        await gateway.finish("one", reward=1.0)
        body = {"input": "a", "tools": [{"type": "function", "name": "add"}], "parallel_tool_calls": False}
        _, response = await gateway.post("/v1/responses", {**body, "max_output_tokens": 4})
        assert [item["type"] for item in response["output"]] == ["function_call"]
        assert response["parallel_tool_calls"] is False
        body = {"model": "default", "messages": [USER], "tools": [{"name": "add", "input_schema": {}}]}
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        _, message = await gateway.post("/v1/messages", {**body, "tool_choice": choice, "max_tokens": 4})
        assert [block["type"] for block in message["content"]] == ["tool_use"]
    [result] = await published(client, keys)
    assert list(result.token_ids[: len(first["token_ids"])]) == first["token_ids"]


async def test_a_caller_that_leaves_cancels_its_job_and_may_come_again(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async def asked(count: int) -> list[bytes]:
        jobs: list[bytes] = []

        async def there() -> bool:
            jobs[:] = await client.zrange(keys.jobs, 0, -1)
            return len(jobs) == count

        await eventually(there, f"{count} jobs to wait")
        return jobs

    settings = with_gateway(config, max_requests=2)
    async with serving(settings, None) as gateway:
        body = {"messages": [USER], "rollout_id": "gone", **SHORT}
        both = (body, {**body, "stream": True})
        calls = [asyncio.create_task(gateway.post("/v1/chat/completions", one)) for one in both]
        [job] = await asked(1)
        async with gateway.http.post(gateway.url + "/v1/chat/completions", json=body) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        calls[0].cancel()
        await asyncio.wait(calls[:1])

        await in_hand(gateway, 1)
        assert await client.zscore(ARQ_ABORT, job) is None, "the other one waits for it"
        calls[1].cancel()

        async def cancelled() -> bool:
            return await client.zscore(ARQ_ABORT, job) is not None

        await eventually(cancelled, "the job to be cancelled")
    async with serving(settings, backend) as gateway:
        assert (await gateway.chat(**body))["rollout"]["turn"] == 0


async def test_a_caller_that_leaves_amid_a_stream_is_not_in_hand_any_more(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        body = {"messages": [USER], "stream": True, "max_tokens": 200}
        async with gateway.http.post(gateway.url + "/v1/chat/completions", json=body) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            assert b'"role":"assistant"' in await answer.content.readline()
            answer.close()
        await in_hand(gateway, 0)

        async def over() -> bool:
            return (await snapshot(client, keys)).queued_jobs == 0

        await eventually(over, "the job to end")


async def test_no_answer_in_time_says_what_was_waited_for(
    config: Config, client: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(with_gateway(config, request_timeout_s=LIMIT_S), None) as gateway:
        asked = asyncio.create_task(gateway.post("/v1/chat/completions", {"messages": [USER]}))

        async def queued() -> bool:
            return (await snapshot(client, keys)).queued_jobs == 1

        await eventually(queued, "the job to be queued")
        skip(monkeypatch)
        status, body = await asked
        assert (status, "waited for a worker" in body["error"]["message"]) == (504, True)


async def test_a_model_without_vision_is_shown_no_image(config: Config) -> None:
    images = msgspec.structs.replace(config.images, hosts=("127.0.0.1",))
    shown = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    body = {"messages": [{"role": "user", "content": shown}]}
    async with serving(msgspec.structs.replace(config, images=images), None) as gateway:
        for more in ({"tools": [{"type": "function"}]}, {"rollout_id": "r"}):
            status, answer = await gateway.post("/v1/chat/completions", body | more)
            assert (status, "this model takes none" in answer["error"]["message"]) == (400, True)


async def test_a_batch_is_answered_in_order(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        prompts = [{"messages": [user(text)]} for text in ("a", "bb bb bb", "c")]
        options = {"n": 2, "max_tokens": 4, "logprobs": True}
        status, envelopes = await gateway.post("/infer/", {"infer_requests": prompts, "request_config": options})
        assert status == 200
        assert len(envelopes) == 6
        lengths = [len(one["response"]["prompt_token_ids"]) for one in envelopes]
        assert lengths[0] == lengths[1] == lengths[4] < lengths[2] == lengths[3]
        shaped = options | {"n": 1, "structured_outputs_regex": "a|b", "presence_penalty": 0.5, "top_logprobs": 2}
        status, envelopes = await gateway.post("/infer/", {"infer_requests": prompts[:1], "request_config": shaped})
        [choice] = envelopes[0]["response"]["choices"]
        assert choice["message"]["content"] in ("a", "b")
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
        status, body = await gateway.post("/infer/", {"infer_requests": [{"messages": [USER], "images": ["a.png"]}]})
        assert (status, body["error"]["param"]) == (400, "infer_requests.0.images.0")


async def test_errors_say_where_and_never_repeat_what_was_sent(
    config: Config, backend: HfBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_GATEWAY_API_KEY", "s3cret")
    async with serving(config, backend, key="s3cret") as gateway:
        assert (await gateway.post("/v1/chat/completions", {}))[0] == 401
        head = {"Authorization": "Bearer s3cret"}
        for body, expected, path in (
            ({"messages": [{"role": "wrong-role"}]}, 422, "messages.0.role"),
            ({"messages": []}, 422, "messages"),
            ({"messages": [USER], "model": "gpt-9"}, 404, "model"),
            ({"messages": [USER], "logit_bias": {"a": 2}}, 400, "logit_bias"),
            ({"messages": [USER], "guided_regex": "s3cret"}, 400, "guided_regex"),
            ({"messages": [USER], "max_token": 3}, 400, "max_token"),
            ({"messages": [USER], "repetition_penalty": 0}, 400, "repetition_penalty"),
            ({"messages": [USER], "max_tokens": 1000}, 400, None),
        ):
            status, answer = await gateway.post("/v1/chat/completions", body, **head)
            assert (status, answer["error"]["param"]) == (expected, path), answer
            assert "wrong-role" not in str(answer)
            assert "s3cret" not in str(answer)
        with pytest.raises(openai.BadRequestError, match="invalid_request"):
            await gateway.openai.chat.completions.create(model="default", messages=[USER], max_tokens=1000)  # type: ignore[list-item]
        async with gateway.http.get(gateway.url + "/metrics", headers=head) as answer:
            page = await answer.text()
        assert 'sluice_gateway_requests_total{route="/v1/chat/completions",status="422"} 2.0' in page
        async with gateway.http.get(gateway.url + "/openapi.json", headers=head) as answer:
            paths = (await answer.json())["paths"]
        assert {"/v1/chat/completions", "/infer/", "/health", "/metrics"} <= set(paths)


async def test_a_served_name_may_have_a_slash(config: Config) -> None:
    name = "Qwen/Qwen3-8B"
    async with serving(with_gateway(config, model_name=name), None) as gateway:
        assert (await gateway.openai.models.retrieve(name)).id == name
        for path in (f"/v1/models/{name}", "/v1/models/Qwen%2FQwen3-8B", f"/rollouts/a/b/v1/models/{name}"):
            async with gateway.http.get(gateway.url + path) as answer:
                assert (answer.status, (await answer.json())["id"]) == (200, name)
        async with gateway.http.get(f"{gateway.url}/v1/models/{name}/x") as answer:
            assert answer.status == 404
