"""Requests that schemathesis makes of the OpenAPI documents, right and wrong ones, for both servers.

- No answer is a 5xx; every one has a declared status, content type and schema.
- What they hit by chance is not counted on: right requests of our own are among them.
- The same requests every time that the same modules are loaded: hypothesis also tries the constants in their source.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import requests
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import Case, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.openapi import from_dict, from_url
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sluice.pipeline.config.types import Config, GatewayConfig
from sluice.workers.engine.hf import HfBackend
from tests.deadlines import HANG_S
from tests.image_site import Site
from tests.integration.gateway.harness import USER, serving
from tests.integration.rollout.conftest import Serve, a_request

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 8  # of each operation and mode
UNTIMED: Any = list(HealthCheck)
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 4},
    "/v1/completions": {"prompt": "seven", "max_tokens": 4},
    "/v1/messages": {"model": "default", "messages": [USER], "max_tokens": 4},
    "/v1/responses": {"input": "seven", "max_output_tokens": 4},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
}
Seen = Counter[tuple[str, int]]  # of operation and status
ONE_OPERATION: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "one", "version": "1"},
    "paths": {"/": {"post": {"responses": {"200": {"description": "fine"}}}}},
}
# schemathesis imports its parts at their first use, and pytest parses each. That use must not come in a thread: two
# threads that parse at once can end in a SystemError (CPython issue 106905; seen once, on 3.11.7).
for found in from_dict(ONE_OPERATION).get_all_operations():
    assert isinstance(found, Ok)
    found.ok().as_strategy()


def attack(url: str, server_url: str = "") -> Seen:
    """What was answered. Raises for an answer that breaks the document."""
    schema, seen = from_url(url + "/openapi.json"), Seen()
    with requests.Session() as session:
        for found in schema.get_all_operations():
            assert isinstance(found, Ok), found
            operation = found.ok()
            _ask(operation, GenerationMode.POSITIVE, session, seen, server_url)
            if operation.body:  # any text is right in a path
                _ask(operation, GenerationMode.NEGATIVE, session, seen, server_url)
    return seen


def _ask(operation: Any, mode: GenerationMode, session: requests.Session, seen: Seen, server_url: str) -> None:
    @seed(7)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=UNTIMED)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        if mode is GenerationMode.POSITIVE:
            _aim(case.body, server_url)
            if operation.path == "/v1/rollout/init":  # the ids of POST /rollout would be conflicts
                body: Any = case.body
                body["rollout_id"] = f"init {body['rollout_id'][:200]}"
        answer: Response = case.call(session=session, timeout=HANG_S)
        case.validate_response(answer, checks=CHECKS)
        seen[operation.label, answer.status_code] += 1

    ask()


def ask_rightly(schema: Any, path: str, body: dict[str, Any], status: int = 200) -> Response:
    """The answer. Raises for another status, or one that breaks the document."""
    case: Case = schema[path]["POST"].Case(body=body, media_type="application/json")
    answer = case.call(timeout=HANG_S)
    assert answer.status_code == status, (path, answer.text)
    case.validate_response(answer, checks=CHECKS)
    return answer


def ask_in_both_ways(url: str) -> None:
    """Every kind of answer that can be sent whole and as events. Raises for one that breaks the document."""
    schema = from_url(url + "/openapi.json")
    for path, body in RIGHT.items():
        ask_rightly(schema, path, body)
        answer = ask_rightly(schema, path, {**body, "stream": True})
        assert answer.headers["content-type"][0].startswith("text/event-stream"), path


def ask_in_both_protocols(url: str, server_url: str) -> None:
    """For a rollout. Raises for an answer that breaks the document."""
    schema = from_url(url + "/openapi.json")
    for path, status in (("/rollout", 200), ("/v1/rollout/init", 202)):
        ask_rightly(schema, path, a_request(server_url, f"right {status}"), status)


def _aim(body: Any, server_url: str) -> None:
    """What the document cannot say: names that are served, and how much a tiny model decodes in a test's time."""
    if not isinstance(body, dict):
        return
    body |= {name: right for name, right in (("model", "default"), ("server_url", server_url)) if name in body}
    for name, most in (("max_tokens", 4), ("max_completion_tokens", 4), ("n", 2)):
        if type(body.get(name)) is int and body[name] > most:
            body[name] = most
    _aim(body.get("request_config"), server_url)
    _aim(body.get("sampling_params"), server_url)


async def test_the_gateway(config: Config, backend: HfBackend) -> None:
    config = msgspec.structs.replace(config, gateway=GatewayConfig(request_timeout_s=HANG_S))
    async with serving(config, backend) as gateway:
        seen = await asyncio.to_thread(attack, gateway.url)
        await asyncio.to_thread(ask_in_both_ways, gateway.url)
    assert seen["POST /v1/chat/completions", 422] > 0
    for path in ("/v1/completions", "/inference/v1/generate", "/tokenize", "/detokenize"):
        assert seen[f"POST {path}", 422] > 0


async def test_the_rollout_server(serve: Serve, site: Site) -> None:
    async with serve() as server:
        seen = await asyncio.to_thread(attack, server.url, site.url(""))
        await asyncio.to_thread(ask_in_both_protocols, server.url, site.url(""))
    assert seen["POST /rollout", 422] > 0
    assert set(site.asked) - {"/v1/rollout/completed"}, "the trainer is told of the ends"


async def test_ten_thousand_messages_are_more_than_the_model_takes(config: Config, backend: HfBackend) -> None:
    config = msgspec.structs.replace(config, gateway=GatewayConfig(request_timeout_s=HANG_S))
    async with serving(config, backend) as gateway:
        for more in ({}, {"rollout_id": "many"}):
            status, answer = await gateway.post("/v1/chat/completions", {"messages": [USER] * 10_000, **more})
            assert (status, answer["error"]["type"]) == (413, "invalid_request_error"), answer
