"""Bodies that are too large, too deep or no JSON, asked of both servers: an error says so, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from sluice.pipeline.config.types import Config
from tests.deadlines import HANG_S
from tests.integration.gateway.harness import serving
from tests.integration.rollout.conftest import Serve, a_request

JSON = "application/json"
TOO_MUCH = ((413, "request_too_large"), (422, "invalid_request"))
MB = 2**20
REFUSED = [(status, "invalid_request_error") for status in (400, 413, 422)]

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
    "huge": b"9" * 300,
    "beyond 64 bits": b"18446744073709551616",
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
        await refuse_all(
            server.http, server.url, ["/rollout", "/v1/rollout/init", "/rollout/cancel", "/rollout/forget"]
        )
        _, health = await server.get("/health")
        assert (health["status"], health["in_flight"]) == ("healthy", 0)


async def test_the_gateway(config: Config, client: Any, keys: Any) -> None:
    async with serving(config, None) as gateway:
        paths = ["/v1/chat/completions", "/infer/", "/v1/rollout/completed", "/v1/rollout/r-1/finish"]
        paths += ["/v1/rollouts", "/rollouts/r-1/v1/chat/completions"]
        paths += ["/v1/completions", "/inference/v1/generate", "/tokenize", "/detokenize"]
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
            if name in ("message: huge", "message: beyond 64 bits", "message: surrogate"):
                body = b'{"infer_requests": [' + body + b"]}"
                status, problem = await ask(gateway.http, gateway.url + "/infer/", body)
                assert (status, problem["error"]["type"]) in REFUSED, (name, status, problem)
        body = b'{"final_status": "COMPLETED", "truth": ' + b"9" * 30 + b"}"
        status, problem = await ask(gateway.http, gateway.url + "/v1/rollout/r-1/finish", body)
        assert (status, "beyond 64 bits" in problem["error"]["message"]) == (422, True), problem
    assert await client.zcard(keys.jobs) == 0


COSTLY = {
    "a number for each message": b'{"messages": [' + b"1," * 7_000_000 + b"1]}",
    "an object for each message": b'{"messages": [' + b"{}," * 4_600_000 + b"{}]}",
    "ten thousand messages": b'{"messages": [' + b'{"role": "user", "content": "a"},' * 10_000 + b"{}]}",
    "blanks": b'{"messages": [{"role": "user", "content": "' + b" " * 14_800_000 + b'"}]}',
    "parts": b'{"messages": [{"role": "user", "content": [' + b'{"type": "text", "text": ""},' * 999 + b"{}]}]}",
    "tools": b'{"messages": [], "tools": [' + b"{}," * 9_999 + b"{}]}",
    "a list in a list": b'{"messages": [' + b"[" * 120 + b"]" * 120 + b"]}",
}
"""What cost gigabytes and minutes before it was refused. The sizes are those of the callers that found it."""


async def test_what_costs_too_much_is_refused_at_once(config: Config, client: Any, keys: Any, serve: Serve) -> None:
    settings = msgspec.structs.replace(config.gateway, max_body_mb=16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with serving(msgspec.structs.replace(config, gateway=settings), None) as gateway, serve() as server:
        chat, infer = gateway.url + "/v1/chat/completions", gateway.url + "/infer/"
        for name, body in COSTLY.items():
            given = body[:-1] + b', "rollout_id": "r", "server_url": "http://127.0.0.1:1", "tokenizer_name": "none"}'
            batch = b'{"infer_requests": [' + body + b"]}"
            for url, sent in ((chat, body), (infer, batch), (server.url + "/rollout", given)):
                if name == "tools" and url == infer:
                    continue  # none is taken there at all
                async with asyncio.timeout(HANG_S):
                    status, problem = await ask(gateway.http, url, sent)
                assert (status, problem["error"]["code"]) in TOO_MUCH, (name, url, status, problem)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 512 * 1024, f"{grown} KiB more"
    assert await client.zcard(keys.jobs) == 0


async def test_the_first_wrong_item_of_a_list_is_the_answer(config: Config, client: Any, keys: Any) -> None:
    mask = b'{"messages": [{"role": "user", "content": "a"}], "response_mask": [' + b"2," * 300_000 + b"2]}"
    async with serving(config, None) as gateway:
        status, problem = await ask(gateway.http, gateway.url + "/v1/chat/completions", mask)
        assert (status, problem["error"]["param"]) == (422, "response_mask.0")


async def test_of_two_equal_keys_the_last_one_counts(serve: Serve) -> None:
    body = json.dumps(a_request("http://127.0.0.1:1", tokenizer_name="none"))
    async with serve() as server:
        status, answer = await server.post("/rollout", (body[:-1] + ', "rollout_id": "last"}').encode())
        assert (status, answer["rollout_id"]) == (200, "last")
        assert (await server.get("/rollout/r-1/status"))[1]["status"] == "unknown"
