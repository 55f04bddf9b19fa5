"""Both bearer keys set: nobody is answered without them, and neither of them is ever shown or stored."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sluice.pipeline import logs
from sluice.pipeline.config.types import Config
from sluice.pipeline.wire.keys import Keys
from tests.image_site import Site
from tests.integration.gateway.harness import USER, Gateway, serving
from tests.integration.rollout.conftest import Serve, Served, a_request

KEYS = {"SLUICE_GATEWAY_API_KEY": "gw-k3y-s3cret-4711", "SLUICE_ROLLOUT_API_KEY": "ro-k3y-s3cret-0815"}
GATEWAY_KEY, SERVER_KEY = KEYS.values()
WRONG = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {GATEWAY_KEY}"})


@pytest.fixture
async def both(
    config: Config, serve: Serve, source: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Gateway, Served]]:
    """A gateway that nobody decodes for, and a rollout server that knows its model's tokenizer."""
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    logs.configure("test")
    async with (
        serving(config, None, key=GATEWAY_KEY) as gateway,
        serve(key=SERVER_KEY, tokenizers={"policy": str(source)}) as server,
    ):
        yield gateway, server


async def routes(http: aiohttp.ClientSession, url: str, key: str) -> list[tuple[str, str]]:
    """Method and path of all that the document lists."""
    async with http.get(url + "/openapi.json", headers={"Authorization": f"Bearer {key}"}) as answer:
        document = await answer.json()
    listed = [(method.upper(), path) for path, found in document["paths"].items() for method in found]
    assert len(listed) > 5
    return [*listed, ("GET", "/openapi.json"), ("GET", "/docs/"), ("GET", "/no/such/page"), ("GET", "/health/x")]


async def test_every_route_but_health_needs_its_own_key(both: tuple[Gateway, Served]) -> None:
    gateway, server = both
    for url, key, other in ((gateway.url, GATEWAY_KEY, SERVER_KEY), (server.url, SERVER_KEY, GATEWAY_KEY)):
        for method, path in await routes(gateway.http, url, key):
            for headers in (*WRONG, {"Authorization": f"Bearer {other}"}):
                async with gateway.http.request(method, url + path, headers=headers, data=b"{") as answer:
                    assert answer.status == (200 if path == "/health" else 401), (method, path)
                    assert path == "/health" or answer.headers["WWW-Authenticate"] == "Bearer"


async def test_no_key_is_shown_or_stored(
    both: tuple[Gateway, Served],
    site: Site,
    run_dir: Path,
    client: Any,
    keys: Keys,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway, server = both
    shown = [text async for text in failures(gateway, server, site)]
    for url, key in ((gateway.url, GATEWAY_KEY), (server.url, SERVER_KEY)):
        async with gateway.http.get(url + "/metrics", headers={"Authorization": f"Bearer {key}"}) as answer:
            shown.append(await answer.text())
    written = capfd.readouterr()
    assert "rollout error" in written.err
    stored = [path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file()]
    shown += [written.out, written.err, caplog.text, *stored, *[text async for text in of_broker(client, keys)]]
    for key in KEYS.values():
        assert not [text for text in shown if key in text or key[3:] in text]


async def failures(gateway: Gateway, server: Served, site: Site) -> AsyncIterator[str]:
    """Answers to requests that go wrong in many ways, the right keys among them."""
    to_gateway, to_server = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
    for body in (
        {"messages": [USER]},
        {"messages": [{"role": GATEWAY_KEY[:5]}]},
        b"{",
        {"messages": [USER], "model": "x"},
    ):
        sent: Any = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with gateway.http.post(gateway.url + "/v1/chat/completions", headers=to_gateway, **sent) as answer:
            yield await answer.text()
    for at, (url, key, more) in enumerate(
        (
            (gateway.url, GATEWAY_KEY, {}),  # nobody decodes: 504
            (gateway.url, "another", {}),  # 401
            (site.url(""), GATEWAY_KEY, {}),  # 404
            ("http://127.0.0.1:1", GATEWAY_KEY, {}),
            ("http://example.com", GATEWAY_KEY, {}),
            (gateway.url, GATEWAY_KEY, {"tokenizer_name": "none"}),
            (gateway.url, GATEWAY_KEY, {"max_turns": 0}),
            (gateway.url, GATEWAY_KEY + "\r\n", {}),
            (gateway.url, GATEWAY_KEY, {"tool_server_url": site.url("/mcp")}),
        )
    ):
        request = {"tokenizer_name": "policy", **more}
        body = a_request(url, f"k-{at}", callback_api_key=key, **request)
        async with server.http.post(server.url + "/rollout", json=body, headers=to_server) as answer:
            text = await answer.text()
            assert answer.status == 422 or '"ERROR"' in text, text
            yield text


async def of_broker(client: Any, keys: Keys) -> AsyncIterator[str]:
    """Every value of the run."""
    readers = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"stream": client.xrange,
        b"set": client.smembers,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"zset": lambda key: client.zrange(key, 0, -1),
    }
    async for key in client.scan_iter(match=f"*{keys.run}*"):
        kind = await client.type(key)
        with contextlib.suppress(KeyError):
            yield f"{key} {await readers[kind](key)}"
