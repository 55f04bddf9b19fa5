"""URLs and names in requests: the rollout server asks listed hosts only, and reads no file that a caller names."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.image_site import Site
from tests.integration.hostile.named import served_with
from tests.integration.http.names import Names
from tests.integration.rollout.conftest import Serve, a_request
from tests.integration.rollout.peer import Says, ScriptedTrainer

URLS = (
    "http://example.com",
    "http://localhost:{port}",
    "http://169.254.169.254/latest/meta-data",
    "http://2852039166",
    "http://0251.0376.0251.0376",
    "http://[::ffff:169.254.169.254]",
    "http://[::ffff:127.0.0.1]:{port}",
    "http://2130706433:{port}",
    "http://0x7f000001:{port}",
    "http://0177.0.0.1:{port}",
    "http://127.1:{port}",
    "http://0:{port}",
    "http://127.0.0.1:{port}@127.0.0.2:{port}",
    "http://user@127.0.0.1:{port}",
    "http://127.0.0.2:{port}#@127.0.0.1:{port}",
    "http://127.0.0.1:{port}/\r\nX-Injected: 1",
    "http://127.0.0.1:{port}\\@127.0.0.2:{port}",
    "http://127.0.0.1%00.example.com:{port}",
    "http://\u2460\u2461\u2466.0.0.2:{port}",
    "gopher://127.0.0.1:{port}",
    "file:///etc/passwd",
    "//127.0.0.1:{port}",
    "http://[",
    "",
)


async def test_hosts_that_are_not_listed_are_422_and_never_asked(serve: Serve, site: Site) -> None:
    right = f"http://127.0.0.1:{site.port}"
    async with serve(hosts=(f"127.0.0.1:{site.port}",)) as server:
        for url in (url.format(port=site.port) for url in URLS):
            for where, more in (("server_url", {"server_url": url}), ("tool_server_url", {"tool_server_url": url})):
                for path in ("/rollout", "/v1/rollout/init"):
                    status, problem = await server.post(
                        path, a_request(right, **more) if where != "server_url" else a_request(url)
                    )
                    assert (status, problem["error"]["param"]) == (422, where), (path, url, problem)
    assert not site.asked


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::1]", "[::]", "0.0.0.0"],
)
async def test_a_listed_trap_is_refused_when_it_is_asked(serve: Serve, site: Site, host: str) -> None:
    url = f"http://{host}:{site.port}"
    async with serve(hosts=(f"{host}:*",)) as server:
        _, answer = await server.post("/rollout", a_request(url))
        assert answer["extra_fields"]["error_category"] == "validation_error", answer
        assert "its host resolves to" in answer["error_message"]
        _, answer = await server.post("/rollout", a_request(url, "r-2", tool_server_url=url))
        assert answer["extra_fields"]["error_category"] == "tool_error", answer
        assert "its host resolves to" in answer["error_message"]
    assert not site.asked


async def test_a_listed_name_whose_record_is_a_trap_is_refused(
    tools_tokenizer: Any, tokenizer_dirs: dict[str, str]
) -> None:
    names = Names(metadata_example=["169.254.169.254"], local_example=["127.0.0.1"])
    async with ScriptedTrainer(tools_tokenizer, [Says("1")]).serving() as trainer:
        hosts = ("metadata.example:*", "local.example:*")
        async with served_with(names, tokenizer_dirs, *hosts) as (server, _), aiohttp.ClientSession() as caller:
            for name, why in (("metadata", "a link-local address"), ("local", "this machine")):
                body = a_request(f"http://{name}.example:{trainer.url.rpartition(':')[2]}", name)
                async with caller.post(server.url("/rollout"), json=body) as response:
                    assert why in (await response.json())["error_message"]
        assert trainer.calls == []


async def test_a_name_that_moves_between_two_turns_is_checked_again(
    tools_tokenizer: Any, tokenizer_dirs: dict[str, str]
) -> None:
    names = Names(moves_example=["127.0.0.1", "169.254.169.254"])
    asked: list[aiohttp.ClientSession] = []

    async def then_moves(trainer: ScriptedTrainer, call: dict[str, Any]) -> web.Response:
        asked[0].connector.clear_dns_cache()  # type: ignore[union-attr]  # as when its time has run out
        says = Says(None, [("c-1", "multiply", {"a": 15, "b": 23})])
        return web.json_response(trainer.honest(says, call), headers={"Connection": "close"})

    async with ScriptedTrainer(tools_tokenizer, [then_moves]).serving() as trainer:
        port = trainer.url.rpartition(":")[2]
        hosts = ("moves.example:*", f"127.0.0.1:{port}")
        async with served_with(names, tokenizer_dirs, *hosts) as (server, http), aiohttp.ClientSession() as caller:
            asked.append(http)
            body = a_request(f"http://moves.example:{port}")
            async with caller.post(server.url("/rollout"), json=body) as response:
                answer = await response.json()
        assert (answer["status"], answer["metrics"]["num_llm_calls"]) == ("ERROR", 1)
        assert "169.254.169.254, a link-local address" in answer["error_message"]
        assert (len(trainer.calls), trainer.finished) == (1, [])


@pytest.mark.parametrize("field", ["server_url", "tool_server_url"])
async def test_a_listed_host_does_not_lead_elsewhere(serve: Serve, site: Site, field: str) -> None:
    async def elsewhere(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": site.url("/secret")})

    site.routes |= dict.fromkeys(("/v1/chat/completions", "/mcp"), elsewhere) | {"/secret": b"{}"}
    async with serve(hosts=("127.0.0.1:*",)) as server:
        urls = {"tool_server_url": site.url("/mcp")} if field == "tool_server_url" else {}
        _, answer = await server.post("/rollout", a_request(site.url(""), **urls))
        assert answer["status"] == "ERROR"
        assert "redirect" in answer["error_message"]
    assert site.asked
    assert "/secret" not in site.asked


async def test_a_tokenizer_is_named_from_the_list_alone(
    serve: Serve, tokenizer_dirs: dict[str, str], site: Site
) -> None:
    inside = tokenizer_dirs["tools"]
    names = (
        "file:///etc/passwd",
        "/etc/passwd",
        inside,
        f"{inside}/../tools",
        "../tools",
        "./tools",
        "tools/",
        "Tools",
    )
    async with serve() as server:
        for at, name in enumerate((*names, "tools\n", "tools\x00", "gpt2", site.url("/x"))):
            _, answer = await server.post("/rollout", a_request(site.url(""), f"r-{at}", tokenizer_name=name))
            assert answer["extra_fields"]["error_category"] == "tokenizer_error", name
            assert "is not listed; known: bare, tools, words" in answer["error_message"]
        _, answer = await server.post("/rollout", a_request(site.url(""), "last", tokenizer_revision="../../x"))
        assert "remove tokenizer_revision" in answer["error_message"]
    assert not any(path.startswith("/x") for path in site.asked)
