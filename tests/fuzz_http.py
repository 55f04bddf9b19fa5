"""Mutants of honest requests, sent to real servers: an answer that says what is wrong comes of each, and nothing else.

`tests/integration/hostile/test_fuzz.py` runs a sample; `make soak` runs all of it (`tests/soak/test_fuzz.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from sluice.consumers.dashboard.app import make_app
from sluice.consumers.dashboard.monitor import Monitor
from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.pipeline.config.types import Config, GatewayConfig
from sluice.workers.engine.hf import HfBackend
from tests import mutants
from tests.integration.gateway.harness import USER, serving
from tests.integration.rollout.conftest import Serve
from tests.served import served

_AT_ONCE = 16
_ANSWER_S = 60
_FORM = {
    "Sec-Fetch-Site": "same-origin", "HX-Request": "true", "Content-Type": "application/x-www-form-urlencoded"
}  # fmt: skip
_FAULTS = (b"internal error (", b"fault of the", b"Traceback", b'"code":500', b'"code": 500')
_ODD_PARTS = [
    "",
    ".",
    "..",
    "x" * 3000,
    "%",
    "\x00",
    "\r\n",
    "é\u4e1c",
    "\u202e",
    "-1",
    "9" * 30,
    "nan",
    "a/b",
    "?",
    "{}",
]

Seen = Counter[tuple[str, int]]  # of endpoint and status


@dataclass(frozen=True)
class Endpoint:
    """`path` and `bodies` are honest ones; `{}` in them is the number of a round. No bodies: a GET."""

    path: str
    bodies: Sequence[Any] = ()
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})

    def raw(self) -> list[bytes]:
        """The bodies as they are sent."""
        return [one.encode() if isinstance(one, str) else json.dumps(one).encode() for one in self.bodies]


Made = tuple[Endpoint, str, bytes | None]  # with address and body
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
_CHATS: list[Any] = [
    {"messages": [USER], "max_tokens": 2},
    {"model": "default", "messages": [USER], "max_completion_tokens": 2, "stream": True,
     "stream_options": {"include_usage": True}},
    {"messages": [USER], "max_tokens": 2, "rollout_id": "chat-{}", "response_mask": None},
    {"messages": [{"role": "system", "content": "a"}, USER, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "3"}],
     "max_tokens": 2, "tools": [_TOOL], "tool_choice": "auto"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2, "n": 2, "seed": 7,
     "temperature": 0.5, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "stop": ["a", "é"], "logprobs": True,
     "stop_token_ids": [3]},
]  # fmt: skip
_RESPONSE = {
    "rollout_id": "chat-{}", "status": "COMPLETED", "final_messages": [USER], "finish_reason": "stop",
    "metrics": {"num_llm_calls": 1, "tool_latency_ms": 0.5}, "extra_fields": {"http_status": 200},
}  # fmt: skip
GATEWAY = [
    Endpoint("/v1/chat/completions", _CHATS),
    Endpoint("/infer/", [
        {"infer_requests": [{"messages": [USER]}], "request_config": {"max_tokens": 2, "n": 2, "stop": ["a"]}},
        {"infer_requests": [{"messages": [USER]}, {"messages": [USER]}], "request_config": {"max_tokens": 1}},
    ]),
    Endpoint("/v1/rollout/completed", [_RESPONSE]),
    Endpoint("/v1/rollout/chat-{}/finish", [
        {"final_status": "COMPLETED", "reward": 0.5, "truth": {"a": [1]}, "num_turns": 1},
    ]),
    Endpoint("/v1/models/default"), Endpoint("/v1/models"), Endpoint("/health"), Endpoint("/metrics"),
    Endpoint("/docs"), Endpoint("/openapi.json"),
]  # fmt: skip


def rollout_server(gateway: str) -> list[Endpoint]:
    """Its endpoints; the model is asked for at the gateway."""
    asked = {
        "rollout_id": "try-{}", "server_url": gateway, "messages": [USER], "tokenizer_name": "policy", "max_turns": 2,
        "sampling_params": {"max_tokens": 2, "temperature": 0.5}, "max_tokens_total": 64,
        "metadata": {"max_user_turns": 1}, "callback_api_key": "k",
    }  # fmt: skip
    return [
        Endpoint("/rollout", [asked]),
        Endpoint("/v1/rollout/init", [{**asked, "rollout_id": "init-{}"}]),
        Endpoint("/rollout/cancel", [{"rollout_id": "try-{}"}]),
        Endpoint("/rollout/forget", [{"rollout_id": "try-{}"}]),
        Endpoint("/rollout/try-{}/status"), Endpoint("/tools"), Endpoint("/health"), Endpoint("/metrics"),
    ]  # fmt: skip


DASHBOARD = [
    Endpoint("/dead-letters/replay", ["seq_id=r%3Aa%3A0", "reason=failed", "everything=1"], _FORM),
    Endpoint("/dead-letters/drop", ["seq_id=r%3Aa%3A0", "reason=failed", "everything=1"], _FORM),
    *map(Endpoint, ("/", "/jobs?state=dead&after=1&q=r:a", "/jobs/r:a", "/sequences?state=accepted&before=1-1&q=a")),
    *map(Endpoint, ("/sequences/r:a:0?colour=mask", "/pictures/r:a:0", "/workers", "/weights", "/config")),
    *map(Endpoint, ("/dead-letters?reason=failed", "/dead-letters/r:a:0", "/metrics", "/metrics/targets", "/health")),
]


async def everywhere(config: Config, backend: HfBackend, serve: Serve, client: Any, count: int, seed: int) -> Seen:
    """All three servers with a worker behind them, `count` bodies between them; afterwards each does honest work."""
    config = msgspec.structs.replace(config, gateway=GatewayConfig(request_timeout_s=_ANSWER_S, max_body_mb=1))
    seen: Seen = Counter()
    async with contextlib.AsyncExitStack() as scope:
        gateway = await scope.enter_async_context(serving(config, backend))
        tokenizers = {"policy": config.model.path}
        hosts = (gateway.url.removeprefix("http://"),)
        server = await scope.enter_async_context(serve(tokenizers=tokenizers, max_body_mb=1, hosts=hosts))
        dashboard = await scope.enter_async_context(_dashboard(config, client))
        rollouts = rollout_server(gateway.url)
        sites = {gateway.url: GATEWAY, server.url: rollouts, dashboard: DASHBOARD}
        await _attack(gateway.http, _requests(sites, count, seed), seen)
        answer = await gateway.chat([USER], max_tokens=2)
        assert answer["choices"][0]["message"]["role"] == "assistant"
        honest = json.loads(rollouts[0].raw()[0]) | {"rollout_id": "the last one"}
        status, body = await server.post("/rollout", honest)
        assert (status, body["status"]) == (200, "COMPLETED"), body
        for url in (gateway.url, server.url, dashboard):
            async with gateway.http.get(url + "/health") as health:
                assert (await health.json())["status"] == "healthy", url
    return seen


@contextlib.asynccontextmanager
async def _dashboard(config: Config, client: Any) -> AsyncIterator[str]:
    reader = HistoryReader(history_directory(config))
    monitor = Monitor(config, client, reader)
    await monitor.refresh()
    try:
        async with served(make_app(monitor, allow_actions=True)) as server:
            yield server.url("")
    finally:
        monitor.close()
        reader.close()


async def _attack(http: aiohttp.ClientSession, made: Iterator[Made], seen: Seen) -> None:
    async def send_rest() -> None:
        for one in made:
            await _ask(http, *one, seen)

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(send_rest())


def _requests(sites: dict[str, list[Endpoint]], count: int, seed: int) -> Iterator[Made]:
    """Endpoint, path and body; three of four have bodies, and some a path of their own."""
    randomly = random.Random(seed)
    posts = [(url, one, raw) for url, endpoints in sites.items() for one in endpoints for raw in one.raw()]
    gets = [(url, one) for url, endpoints in sites.items() for one in endpoints if not one.bodies]
    seeds = [raw for _, _, raw in posts]
    for number in range(count):
        mark = str(number // len(posts))
        if randomly.random() < 0.25:
            (url, endpoint), body = randomly.choice(gets), None
        else:
            url, endpoint, honest = posts[number % len(posts)]
            make = mutants.of_bytes if endpoint.headers is _FORM else mutants.of_json
            body = honest if randomly.random() < 0.1 else make(honest, seeds, randomly)
            body = body.replace(b"{}", mark.encode())
        path = endpoint.path.replace("{}", mark)
        if randomly.random() < (0.5 if body is None else 0.1):
            path = _path(path, randomly)
        yield endpoint, url + path, body


def _path(path: str, randomly: random.Random) -> str:
    """One part or one value of it is another; encoded, as clients do."""
    route, _, query = path.partition("?")
    parts, pairs = route.split("/")[1:], [pair.split("=") for pair in query.split("&") if pair]
    odd = quote(randomly.choice(_ODD_PARTS), safe="")
    at = randomly.randrange(len(parts) + len(pairs))
    if at >= len(parts):
        pairs[at - len(parts)][1] = odd
    elif len(parts) > 1:
        parts[-1] = odd
    return "/" + "/".join(parts) + ("?" + "&".join("=".join(pair) for pair in pairs) if pairs else "")


async def _ask(http: aiohttp.ClientSession, endpoint: Endpoint, url: str, raw: bytes | None, seen: Seen) -> None:
    about, where = (url[:300], (raw or b"")[:1500]), URL(url, encoded=True)
    method = "GET" if raw is None else "POST"
    async with asyncio.timeout(_ANSWER_S), http.request(method, where, data=raw, headers=endpoint.headers) as answer:
        said, status = await answer.read(), answer.status
        ours = status >= 500 or (raw is not None and any(word in said for word in _FAULTS))
        assert not ours, (status, about, said[:1000])
        if status >= 400 and answer.content_type == "application/json":
            assert msgspec.json.decode(said)["error"]["message"], about
        seen[endpoint.path, status] += 1
