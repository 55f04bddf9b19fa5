"""Servers without a key: which names they answer to, what a browser's page can send them, whom they ask in turn."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from sluice.pipeline.config.types import Config, GatewayConfig, RolloutConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.http.addresses import AllowedHosts
from sluice.producers.agents.state import named_hosts
from tests.integration.gateway.harness import USER, serving
from tests.integration.rollout.conftest import Serve, a_request

OURS = ("localhost", "LOCALHOST:8081", "127.0.0.1", "127.0.0.9:1", "[::1]:8081", "agents.lan", "Agents.LAN:80")
OTHERS = ("rebinds.example", "127.0.0.1.example", "localhost.example:8081", "0.0.0.0", "192.0.2.1", "[::2]", "a b")


async def asked(http: aiohttp.ClientSession, url: str, host: str, *, post: bool = False) -> tuple[int, Any]:
    headers = {"Host": host}
    async with http.request("POST" if post else "GET", url, headers=headers, json={} if post else None) as answer:
        return answer.status, await answer.json()


async def look_for_names(http: aiohttp.ClientSession, url: str, get: str, post: str, setting: str) -> None:
    for host in OURS:
        assert (await asked(http, url + get, host))[0] == 200, host
        assert (await asked(http, url + post, host, post=True))[0] == 422, host
    for host in OTHERS:
        for path, is_post in ((get, False), (post, True), ("/docs", False)):
            status, problem = await asked(http, url + path, host, post=is_post)
            assert (status, problem["error"]["code"]) == (421, "misdirected_request"), (host, path)
            assert setting in problem["error"]["message"]
        assert (await asked(http, url + "/health", host))[0] == 200, "what starts a container asks there"


async def test_the_gateway_answers_to_its_names(config: Config, client: Any) -> None:
    gateway = msgspec.structs.replace(config.gateway, names=("agents.lan",))
    async with serving(msgspec.structs.replace(config, gateway=gateway), None) as site:
        await look_for_names(site.http, site.url, "/v1/models", "/v1/chat/completions", "gateway.names")


async def test_the_rollout_server_answers_to_its_names(serve: Serve) -> None:
    async with serve(names=("agents.lan",)) as site:
        await look_for_names(site.http, site.url, "/tools", "/rollout", "rollout_server.names")


async def test_with_a_key_the_key_is_what_counts(serve: Serve) -> None:
    async with serve(key="key") as site:
        for host in OTHERS[:2]:
            headers = {"Host": host, "Authorization": "Bearer key"}
            assert (await site.get("/tools", headers=headers))[0] == 200


KINDS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp", "")


async def test_a_post_is_json_and_says_so(config: Config, client: Any, serve: Serve) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    async with serving(config, None) as gateway, serve() as server:
        paths = ("/v1/chat/completions", "/infer/", "/v1/rollout/completed", "/v1/rollout/r-1/finish")
        urls = [gateway.url + path for path in paths]
        urls += [server.url + path for path in ("/rollout", "/v1/rollout/init", "/rollout/cancel", "/rollout/forget")]
        for url in urls:
            for kind in KINDS:
                headers = {"Content-Type": kind} if kind else {}
                skipped = () if kind else ("Content-Type",)
                posted = gateway.http.post(url, data=body, headers=headers, skip_auto_headers=skipped)
                async with posted as answer:
                    problem = await answer.json()
                    assert (answer.status, problem["error"]["code"]) == (415, "unsupported_media_type"), (url, kind)
            for kind in ("application/json; charset=utf-8", "Application/JSON"):
                async with gateway.http.post(url, data=b"{}", headers={"Content-Type": kind}) as answer:
                    assert answer.status == 422, (url, kind)


async def test_no_port_of_this_host_is_asked_that_the_configuration_does_not_name(serve: Serve) -> None:
    async with serve(hosts=()) as server:
        for port in (1, 22, 6379, 8082, 9000):
            for host in ("127.0.0.1", "localhost", "[::1]"):
                for field in ("server_url", "tool_server_url"):
                    request = a_request("http://127.0.0.1:8081", messages=[USER]) | {field: f"http://{host}:{port}"}
                    status, problem = await server.post("/rollout", request)
                    assert (status, problem["error"]["param"]) == (422, field), (host, port)


@pytest.mark.parametrize(
    ("gateway", "rollout", "urls"),
    [
        (GatewayConfig(), RolloutConfig(), ["http://127.0.0.1:8081", "http://localhost:8081/v1", "http://[::1]:8081"]),
        (GatewayConfig(port=8100, count=2), RolloutConfig(), ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]),
        (GatewayConfig(), RolloutConfig(gateway_url="http://gateway:9999"), ["http://gateway:9999"]),
        (GatewayConfig(), RolloutConfig(gateway_url="https://[fd00::1]/"), ["https://[fd00::1]"]),
        (GatewayConfig(), RolloutConfig(tool_server_url="http://127.0.0.1:8100/mcp"), ["http://127.0.0.1:8100/mcp"]),
    ],
)
def test_the_servers_that_it_names_are_asked(gateway: GatewayConfig, rollout: RolloutConfig, urls: list[str]) -> None:
    hosts = AllowedHosts(named_hosts(Config(gateway=gateway, rollout=rollout)), "rollout_server.hosts")
    for url in urls:
        hosts.admit(url, "server_url")
    for url in ("http://127.0.0.1:8102", "http://127.0.0.1", "http://gateway:1"):
        with pytest.raises(RequestError, match=r"rollout_server\.hosts"):
            hosts.admit(url, "server_url")
