"""Who may ask, what is looked at, and requests that are refused before anything runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.rollout.conftest import Serve, a_request
from tests.integration.rollout.peer import Says, ScriptedTrainer
from tests.integration.rollout.test_protocols import state_of


async def test_the_inbound_key(serve: Serve, tools_tokenizer: Any) -> None:
    async with ScriptedTrainer(tools_tokenizer, [Says("1")]).serving() as trainer, serve(key="in-1") as served:
        assert (await served.get("/health"))[0] == 200
        assert (await served.get("/docs"))[0] == 200, "the page, which asks for the key that its document needs"
        for path in ("/tools", "/metrics", "/rollout/r-1/status", "/openapi.json"):
            assert (await served.get(path))[0] == 401
        assert (await served.post("/rollout", b"{"))[0] == 401
        right = {"headers": {"Authorization": "Bearer in-1", "Content-Type": "application/json"}}
        assert (await served.get("/tools", **right))[0] == 200
        _, answer = await served.post("/rollout", a_request(trainer.url), **right)
        assert answer["status"] == "COMPLETED"
        assert trainer.keys == [None]


async def test_the_looks(serve: Serve) -> None:
    async with serve() as served:
        _, health = await served.get("/health")
        assert (health["status"], health["service"]) == ("healthy", "rollout-server")
        _, tools = await served.get("/tools")
        assert {one["type"] for one in tools["tools"]} == {"function"}
        _, page = await served.get("/openapi.json")
        post = page["paths"]["/rollout"]["post"]
        assert {"200", "401", "409", "413", "422", "429", "503"} <= set(post["responses"])
        assert post["requestBody"]["content"]["application/json"]["examples"]
        assert all(one.get("summary") and one["tags"] for path in page["paths"].values() for one in path.values())


BAD = {
    "blank id": ({"rollout_id": " "}, "rollout_id"),
    "no messages": ({"messages": []}, "messages"),
    "role": ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
    "far host": ({"server_url": "http://example.com"}, "server_url"),
    "link-local tools": ({"tool_server_url": "http://169.254.169.254/x"}, "tool_server_url"),
    "scheme": ({"server_url": "file:///etc/passwd"}, "server_url"),
    "temperature": ({"sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
    "key": ({"callback_api_key": "sk-secret\nX: y"}, "callback_api_key"),
}


async def test_a_request_that_breaks_the_schema_is_422_with_a_path(serve: Serve) -> None:
    async with serve() as served:
        for name, (change, path) in BAD.items():
            status, problem = await served.post("/rollout", a_request("http://127.0.0.1:1") | change)
            assert (status, problem["error"]["param"]) == (422, path), name
            assert "sk-secret" not in json.dumps(problem)
        assert await state_of(served) == "unknown"


ODD = {
    "nan": b'{"rollout_id": NaN}',
    "infinity": b'{"metadata": {"a": 1e999}}',
    "surrogate": b'{"rollout_id": "\\ud800"}',
    "huge number": b'{"max_turns": ' + b"9" * 5000 + b"}",
    "deep": b'{"metadata": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    "deep enough": b'{"metadata": ' + b'{"a":' * 400 + b"1" + b"}" * 401,
    "not utf-8": b'{"rollout_id": "\xff"}',
    "cut": b'{"rollout_id": ',
    "a list": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("path", ["/rollout", "/v1/rollout/init", "/rollout/cancel", "/rollout/forget"])
async def test_a_body_that_is_no_json_is_refused(serve: Serve, path: str) -> None:
    async with serve() as served:
        for name, body in ODD.items():
            status, problem = await served.post(path, body)
            assert (status in (413, 422), problem["error"]["type"]) == (True, "invalid_request_error"), name


async def test_a_body_that_is_too_large_is_413(serve: Serve) -> None:
    async with serve(max_body_mb=0.01) as served:
        assert (await served.post("/rollout", b" " * 20_000))[0] == 413


async def test_whatever_a_message_carries_comes_back(serve: Serve, tools_tokenizer: Any) -> None:
    odd = {"role": "user", "content": "😀 \u0000 7", "name": "me", "mine": {"big": 2**64 - 1, "deep": [[[None]]]}}
    async with ScriptedTrainer(tools_tokenizer, [Says("1")]).serving() as trainer, serve() as served:
        _, answer = await served.post("/rollout", a_request(trainer.url, messages=[odd]))
        assert answer["final_messages"][0] == odd
        assert trainer.calls[0]["messages"][0] == odd
