"""What shapes an answer, from the request to the worker's masks and back: each field changes it or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.pipeline.config.types import BrokerConfig, Config, GatewayConfig
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import Grammar
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.integration.gateway.harness import USER, Gateway, kept, published, said, serving, user
from tests.roles import run_config
from tests.tiny_models import build_tokenizer, save_tiny_model

SHORT: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
BLANKS = {token: -100.0 for token in build_tokenizer().encode("\t\n\r ")}  # which this model would write for ever
LONG: dict[str, Any] = {"max_tokens": 100, "temperature": 1.0, "seed": 1}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "mul", "parameters": SCHEMA}},
]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}  # else this template ends the thoughts in the prompt
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


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
    return run_config(
        broker_config, keys, run_dir, worker=worker, model={"path": str(source)}, sampling={"logit_bias": BLANKS}
    )


async def refused(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, the field, and what is said."""
    status, answer = await gateway.post(path, body)
    return status, answer["error"]["param"], answer["error"]["message"]


async def test_each_field_changes_the_answer(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        plain = await gateway.chat([USER], **SHORT)
        first = plain["token_ids"][0]
        warm = await gateway.chat([USER], **SHORT | {"temperature": 2.0, "seed": 7})
        for fields in (
            {"presence_penalty": 2.0},
            {"frequency_penalty": 2.0},
            {"repetition_penalty": 3.0},
            {"logit_bias": {str(first): -100}},
            {"allowed_token_ids": [token for token in range(40, 60) if token != first]},
            {"structured_outputs": {"regex": "[a-c]{12}"}},
            {"response_format": FORMAT},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ):
            changed = await gateway.chat([USER], **SHORT, **fields)
            assert changed["token_ids"] != plain["token_ids"], fields
        assert (await gateway.chat([USER], **SHORT | {"temperature": 2.0, "seed": 7}))["token_ids"] == warm["token_ids"]
        other = await gateway.chat([USER], **SHORT | {"temperature": 2.0, "seed": 8})
        assert other["token_ids"] != warm["token_ids"]
        cold = await gateway.chat([USER], **SHORT | {"temperature": 2.0, "seed": 7, "min_p": 0.9})
        assert cold["token_ids"] != warm["token_ids"]
        tokenizer = build_tokenizer()
        single = next(t for t in plain["token_ids"] if tokenizer.encode(tokenizer.decode([t])) == [t])
        without = await gateway.chat([USER], **SHORT, bad_words=[tokenizer.decode([single])])
        assert single not in without["token_ids"]


async def test_text_and_tokens_are_shaped_alike(config: Config, backend: HfBackend) -> None:
    asked: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 1.0, "max_tokens": 20}
    async with serving(config, backend) as gateway:
        _, answer = await gateway.post("/v1/completions", {"prompt": "a", **asked})
        assert answer["choices"][0]["text"] in ("yes", "no")
        short = {"structured_outputs": asked["structured_outputs"], "max_output_tokens": 20}
        _, answer = await gateway.post("/v1/responses", {"input": "a", **short})
        assert answer["output"][0]["content"][0]["text"] in ("yes", "no")
        _, answer = await gateway.post("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": asked})
        assert build_tokenizer().decode(answer["choices"][0]["token_ids"], skip_special_tokens=True) in ("yes", "no")


async def test_a_schema_is_followed_by_every_api(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        chat = await gateway.chat([USER], response_format=FORMAT, **LONG)
        form = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
        body = {"model": "default", "messages": [USER], "max_tokens": 100, "output_config": form}
        status, message = await gateway.post("/v1/messages", body)
        assert status == 200, message
        text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        status, response = await gateway.post("/v1/responses", {"input": "a", "text": text, "max_output_tokens": 100})
        assert status == 200, response
    for written in (said(chat)["content"], response["output"][0]["content"][0]["text"]):
        assert set(json.loads(written)) == {"a"}
    assert json.loads(message["content"][0]["text"]) in ("yes", "no")


async def test_calls_are_forced(config: Config, backend: HfBackend) -> None:
    named = {"type": "function", "function": {"name": "mul"}}
    async with serving(config, backend) as gateway:
        any_of_them = await gateway.chat([USER], tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **LONG)
        [call] = said(any_of_them)["tool_calls"]
        assert call["function"]["name"] in ("add", "mul")
        assert set(json.loads(call["function"]["arguments"])) == {"a"}
        assert any_of_them["choices"][0]["finish_reason"] == "tool_calls"
        client: Any = gateway.openai  # its types have no plain dicts
        stream = await client.chat.completions.create(
            model="default", messages=[USER], tools=TOOLS, tool_choice=named, stream=True, **LONG
        )
        deltas = [choice.delta async for chunk in stream for choice in chunk.choices]
        [(call,)] = [delta.tool_calls for delta in deltas if delta.tool_calls]
        assert call.function.name == "mul"
        assert not any(delta.content for delta in deltas)
        theirs = [{"name": one["function"]["name"], "input_schema": SCHEMA} for one in TOOLS]
        choice = {"type": "tool", "name": "add"}
        body = {"model": "default", "messages": [USER], "max_tokens": 100, "tools": theirs, "tool_choice": choice}
        _, message = await gateway.post("/v1/messages", body)
        assert [(block["type"], block["name"]) for block in message["content"]] == [("tool_use", "add")]
        tools = [{"type": "function", **one["function"]} for one in TOOLS]
        choice = {"type": "function", "name": "mul"}
        asked = {"input": "a", "tools": tools, "tool_choice": choice, "max_output_tokens": 100}
        _, response = await gateway.post("/v1/responses", asked)
        assert [(item["type"], item["name"]) for item in response["output"]] == [("function_call", "mul")]


async def test_a_forced_turn_of_a_rollout_is_marked(
    config: Config, backend: HfBackend, client: Any, keys: Keys
) -> None:
    async with serving(config, backend) as gateway:
        first = await gateway.chat([USER], rollout_id="r", **SHORT)
        more = [USER, said(first), user("more")]
        second = await gateway.chat(more, rollout_id="r", response_format=FORMAT, **LONG)
        assert second["rollout"]["parent"] == 0
        await gateway.finish("r", reward=1.0)
    [result] = await published(client, keys)
    [span] = result.reshaped
    assert list(result.token_ids[span.start : span.end]) == second["token_ids"]
    assert span.sampling.grammar == Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    assert span.library == backend.facts.grammars
    assert span.library.startswith("xgrammar 0.")


async def test_variables_of_the_template_are_rendered_and_begin_a_part(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        plain = await gateway.chat([USER], rollout_id="r", **SHORT)
        kwargs = {"enable_thinking": True}
        thinking = await gateway.chat([USER], rollout_id="r", chat_template_kwargs=kwargs, **SHORT)
        assert (plain["prompt_token_ids"] == thinking["prompt_token_ids"], thinking["rollout"]["parent"]) == (False, -1)
        more = [USER, said(thinking), user("more")]
        second = await gateway.chat(more, rollout_id="r", chat_template_kwargs=kwargs, **SHORT)
        assert second["rollout"]["parent"] == thinking["rollout"]["turn"]
        _, tokens = await gateway.post("/tokenize", {"messages": [USER], "chat_template_kwargs": kwargs})
        assert tokens["tokens"] == thinking["prompt_token_ids"]


async def test_what_the_run_can_not_do_is_refused_by_name(config: Config, backend: HfBackend) -> None:
    chat = "/v1/chat/completions"
    async with serving(config, backend) as gateway:
        for fields, path, says in (
            ({"reasoning_effort": "low"}, "reasoning_effort", "has no such variable"),
            ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking", "has no such variable"),
            ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize", "the gateway sets it"),
            ({"structured_outputs": {"regex": "("}}, None, "regex"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}, None, "json_schema"),
            ({"logit_bias": {"99999": 1}}, None, "logit_bias"),
            ({"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}, "tool_choice", "can't be both"),
        ):
            status, where, message = await refused(gateway, chat, {"messages": [USER], **SHORT, **fields})
            assert (status, where) == (400, path), message
            assert says in message


async def test_reasoning_and_calls_are_read_by_vllms_parsers(config: Config, backend: HfBackend) -> None:
    """The message is made of them; the tokens of a rollout are what was sampled, and a message sent back without its
    reasoning is the turn that was kept.
    """
    pytest.importorskip("vllm")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(config.model.path)
    names = GatewayConfig(tool_parser="vllm:hermes", reasoning_parser="vllm:deepseek_r1")
    shape = {"structured_outputs": {"regex": "[ab]{3}</think>[cd]{3}"}, "temperature": 1.0, "max_tokens": 40, **THINK}
    async with serving(msgspec.structs.replace(config, gateway=names), backend) as gateway:
        first = await gateway.chat([USER], rollout_id="r", **shape)
        thought, text = said(first)["reasoning"], said(first)["content"]
        assert (len(thought), len(text)) == (3, 3)
        assert build_tokenizer().decode(first["token_ids"], skip_special_tokens=True) == f"{thought}</think>{text}"
        client: Any = gateway.openai  # its types have no plain dicts
        stream = await client.chat.completions.create(
            model="default", messages=[USER], stream=True, extra_body=shape | {"seed": 5}
        )
        deltas = [choice.delta.model_dump() async for chunk in stream for choice in chunk.choices]
        shown = [name for delta in deltas for name in ("reasoning", "content") if delta.get(name)]
        assert shown == ["reasoning", "content"]
        more = [USER, {"role": "assistant", "content": text}, user("more")]
        second = await gateway.chat(more, rollout_id="r", **SHORT, **THINK)
        assert second["rollout"]["parent"] == 0
        assert second["prompt_token_ids"][: len(kept(first))] == kept(first)
        asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        forced = await gateway.chat([USER], **asked, **LONG, **THINK)
        assert "reasoning" not in said(forced), "its form leaves no room for thoughts"
        assert forced["choices"][0]["finish_reason"] == "tool_calls"
