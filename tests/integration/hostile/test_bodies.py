"""Bodies that are too large, too deep or no JSON, asked of both servers: an error says so, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from pipeline.config.types import Config
from tests.integration.gateway.harness import USER, serving
from tests.integration.rollout.conftest import Serve, a_request

JSON = "application/json"
MB = 2**20
REFUSED = [(status, "invalid_request_error") for status in (400, 422)]

EVERYWHERE = {
    "nothing": b"",
    "blank": b"  \n",
    "cut": b'{"messages": [',
    "not utf-8": b'{"model": "\xff\xfe"}',
    "utf-16": '{"model": "default"}'.encode("utf-16"),
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "two values": b"{} {}",
    "deep list": b"[" * 100_000,
    "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "huge number": b'{"messages": ' + b"9" * 100_000 + b"}",
    "null bytes": b"\x00" * 100,
}
"""Refused by every route that takes a body."""

HEAD = b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 0, '
IN_A_CHAT = {
    "nan": b'"top_p": NaN}',
    "infinity": b'"top_p": Infinity}',
    "beyond a double": b'"repetition_penalty": 1e999}',
    "huge integer": b'"seed": ' + b"9" * 400 + b"}",
    "huge exponent": b'"max_tokens": 1e400}',
    "surrogate in the model": b'"model": "\\ud800"}',
    "surrogate in the id": b'"rollout_id": "\\udfff"}',
    "surrogate in a stop": b'"stop": ["\\ud83d"]}',
    "surrogate in a tool": b'"tools": [{"type": "function", "function": {"name": "\\ud800"}}]}',
    "nan in a tool": b'"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": NaN}}}]}',
    "deep tool": b'"tools": [{"a": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    "deeper tool": b'"tools": [{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}]}",
    "mask of text": b'"response_mask": ["0"]}',
    "mask of twos": b'"response_mask": [2]}',
    "truth for number": b'"n": true}',
}
IN_A_MESSAGE = {
    "surrogate": b'"\\ud800"',
    "surrogate as a part": b'[{"type": "text", "text": "\\ud800"}]',
    "nan in a part": b'[{"type": "text", "text": "a", "more": NaN}]',
    "huge in a part": b'[{"type": "text", "text": "a", "more": ' + b"9" * 300 + b"}]",
    "deep part": b'[{"type": "text", "text": "a", "more": ' + b"[" * 5000 + b"]" * 5000 + b"}]",
    "a number": b"1",
}


async def ask(http: aiohttp.ClientSession, url: str, body: Any, kind: str = JSON) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    async with http.post(url, data=body, headers={"Content-Type": kind}) as answer:
        assert answer.content_type == JSON
        return answer.status, await answer.json()


async def in_pieces(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(0, num_bytes, 65_536):
        yield b" " * 65_536


async def refuse_all(http: aiohttp.ClientSession, url: str, paths: list[str]) -> None:
    for path in paths:
        for name, body in EVERYWHERE.items():
            status, problem = await ask(http, url + path, body)
            assert (status, problem["error"]["type"]) in REFUSED, (path, name, status, problem)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "nonsense"):
            status, problem = await ask(http, url + path, b"a=1", kind)
            assert status in (400, 415, 422), (path, kind, status, problem)
        for body in (b" " * (MB + 1), in_pieces(2 * MB)):
            status, problem = await ask(http, url + path, body)
            assert (status, problem["error"]["code"]) == (413, "request_too_large"), path


async def test_the_rollout_server(serve: Serve) -> None:
    async with serve(max_body_mb=1) as server:
        await refuse_all(server.http, server.url, ["/rollout", "/v1/rollout/init", "/rollout/cancel"])
        _, health = await server.get("/health")
        assert (health["status"], health["in_flight"]) == ("healthy", 0)


async def test_the_gateway(config: Config, client: Any, keys: Any) -> None:
    async with serving(config, None) as gateway:
        paths = ["/v1/chat/completions", "/infer/", "/v1/rollout/completed", "/v1/rollout/r-1/finish"]
        await refuse_all(gateway.http, gateway.url, paths)
        url = gateway.url + "/v1/chat/completions"
        bodies = {name: HEAD + rest for name, rest in IN_A_CHAT.items()}
        bodies |= {
            f"message: {name}": b'{"messages": [{"role": "user", "content": ' + content + b"}]}"
            for name, content in IN_A_MESSAGE.items()
        }
        for name, body in bodies.items():
            status, problem = await ask(gateway.http, url, body)
            assert (status, problem["error"]["type"]) in REFUSED, (name, status, problem)
    assert await client.zcard(keys.jobs) == 0


async def test_ten_thousand_messages_are_more_than_a_rollout_may_have(serve: Serve) -> None:
    async with serve() as server:
        status, answer = await server.post("/rollout", a_request("http://127.0.0.1:1", messages=[USER] * 10_000))
        assert (status, answer["status"], answer["finish_reason"]) == (200, "COMPLETED", "max_tokens")
        assert len(answer["final_messages"]) == 10_000


async def test_of_two_equal_keys_the_last_one_counts(serve: Serve) -> None:
    body = json.dumps(a_request("http://127.0.0.1:1", tokenizer_name="none"))
    async with serve() as server:
        status, answer = await server.post("/rollout", (body[:-1] + ', "rollout_id": "last"}').encode())
        assert (status, answer["rollout_id"]) == (200, "last")
        assert (await server.get("/rollout/r-1/status"))[1]["status"] == "unknown"
