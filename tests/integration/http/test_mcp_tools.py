"""Tools of a real MCP server (the SDK's), served over streamable HTTP."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, Response
from mcp.server import MCPServer
from mcp.types import CallToolResult
from starlette.types import Receive, Scope, Send

from sluice.pipeline.errors import RequestError
from sluice.pipeline.http.addresses import AllowedHosts
from sluice.producers.agents.tools import ToolBox, tool
from sluice.producers.agents.tools.mcp import mcp_tools
from tests.clock import LIMIT_S, skip
from tests.deadlines import HANG_S
from tests.integration.http.names import Names
from tests.pictures import png
from tests.served import Served, served

HOSTS = AllowedHosts(["127.0.0.1:*"], "rollout_server.hosts")


class Toolshed:
    """An MCP server; `hangs` never answers, and `left` says that it was cancelled."""

    def __init__(self, json_response: bool = False) -> None:
        server = MCPServer("toolshed")
        self.hanging, self.left, self.streams = asyncio.Event(), asyncio.Event(), not json_response
        self.asked: list[str] = []
        for function in (self.add, self.fails, self.hangs, self.huge, self.echo, self.draws):
            server.tool()(function)
        self.app = server.streamable_http_app(json_response=json_response)

    async def add(self, a: int, b: int) -> int:
        """Add two whole numbers."""
        self.asked.append("add")
        return a + b

    async def echo(self, text: str) -> list[str]:
        """The text, twice."""
        return [text, text]

    async def draws(self) -> CallToolResult:
        """A text and a picture."""
        shown = {"type": "image", "data": base64.b64encode(png()).decode(), "mimeType": "image/png"}
        return CallToolResult.model_validate({"content": [{"type": "text", "text": "a red one"}, shown]})

    async def fails(self) -> str:
        """Never works."""
        raise ValueError("out of stock")

    async def hangs(self) -> str:
        """Never answers."""
        self.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return ""

    async def huge(self, num_bytes: int) -> str:
        """Much."""
        return "x" * num_bytes


@pytest.fixture(params=[False, True], ids=["stream", "json"])
async def shed(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Toolshed, Served]]:
    made = Toolshed(json_response=request.param)
    async with served(made.app, grace_s=0.1) as site:
        yield made, site


def call(name: str, id_: str = "c", **arguments: Any) -> dict[str, Any]:
    return {"id": id_, "function": {"name": name, "arguments": arguments}}


async def test_its_tools_are_listed_and_called_side_by_side(shed: tuple[Toolshed, Served]) -> None:
    _, site = shed
    async with mcp_tools(site.url("/mcp"), HOSTS, timeout_s=20) as tools:
        box = ToolBox(tools, 20)
        schemas = {one["function"]["name"]: one["function"] for one in box.schemas()}
        assert schemas["add"]["description"] == "Add two whole numbers."
        assert schemas["add"]["parameters"]["required"] == ["a", "b"]
        calls = [call("add", f"c{at}", a=at, b=1) for at in range(8)] + [call("echo", text="hi")]
        contents = [one["content"] for one in await box.run(calls)]
    assert contents == [*map(str, range(1, 9)), "hi\nhi"]


async def test_its_images_are_parts_of_the_message(shed: tuple[Toolshed, Served]) -> None:
    _, site = shed
    async with mcp_tools(site.url("/mcp"), HOSTS, timeout_s=20) as tools:
        [answer] = await ToolBox(tools, 20).run([call("draws")])
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    assert answer["content"] == [
        {"type": "text", "text": "a red one"},
        {"type": "image_url", "image_url": {"url": url}},
    ]


async def test_what_fails_is_a_message_and_the_rest_goes_on(
    shed: tuple[Toolshed, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, site = shed
    async with mcp_tools(site.url("/mcp"), HOSTS, timeout_s=HANG_S) as tools:
        box = ToolBox(tools, HANG_S)
        calls = [call("fails"), call("add", a="x", b=1), call("add", a=1, b=2)]
        hanging = asyncio.create_task(ToolBox(tools, LIMIT_S).run([call("hangs")]))
        async with asyncio.timeout(HANG_S):
            await made.hanging.wait()
        others = await box.run(calls)
        skip(monkeypatch)
        fails, wrong, works, hangs = [one["content"] for one in (*others, *await hanging)]
        assert fails.startswith("Error: ")
        assert "fails" in fails
        assert wrong.startswith("Error: ")
        assert hangs == "Error: hangs did not answer within 60 s; ask for less, or try another way"
        assert works == "3"
        if made.streams:  # where there is no stream to close, the SDK's server goes on alone
            async with asyncio.timeout(HANG_S):
                await made.left.wait()
        assert (await box.run([call("add", a=2, b=2)]))[0]["content"] == "4"


async def test_an_answer_is_bounded(shed: tuple[Toolshed, Served]) -> None:
    _, site = shed
    async with mcp_tools(site.url("/mcp"), HOSTS, timeout_s=20) as tools:
        box = ToolBox(tools, 20)
        cut, refused = [
            one["content"]
            for one in await box.run([call("huge", num_bytes=300_000), call("huge", num_bytes=17_000_000)])
        ]
        assert cut.endswith("[cut: the first 262144 of 300000 characters]")
        assert refused.startswith("Error: huge ")
        assert (await box.run([call("add", a=2, b=2)]))[0]["content"] == "4"


async def test_a_server_that_dies_fails_its_calls_and_nothing_else() -> None:
    async def own() -> str:
        """Ours."""
        return "still here"

    made = Toolshed()
    async with served(made.app, grace_s=0.1) as site, mcp_tools(site.url("/mcp"), HOSTS, timeout_s=20) as tools:
        box = ToolBox([tool(own)], 20).plus(tools, "mcp")
        assert (await box.run([call("add", a=1, b=1)]))[0]["content"] == "2"
        site.stop.set()
        await site.task
        dead, alive = [one["content"] for one in await box.run([call("add", a=1, b=1), call("own")])]
        assert dead.startswith("Error: add ")
        assert alive == "still here"
    assert made.asked == ["add"]


async def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(RequestError, match=r"tool_server_url: cannot list its tools .*check the tool server"):
        async with mcp_tools(f"http://127.0.0.1:{port}/mcp", HOSTS, timeout_s=10):
            raise AssertionError("there is no server")


async def _never(scope: Scope, receive: Receive, send: Send) -> None:
    assert scope["type"] == "http"
    await asyncio.Event().wait()


async def test_a_server_that_says_nothing_has_a_deadline() -> None:
    async with served(_never, grace_s=0.05) as site:
        with pytest.raises(RequestError, match="tool_server_url: cannot list its tools"):
            async with mcp_tools(site.url("/mcp"), HOSTS, timeout_s=0.3):
                raise AssertionError("it said nothing")


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {"Content-Type": "text/html"}),
        (500, {}),
        (307, {"Location": "/mcp/"}),
        (302, {"Location": "http://169.254.169.254/"}),
    ],
)
async def test_what_is_no_mcp_server_is_an_error(status: int, headers: dict[str, str]) -> None:
    app = FastAPI()
    asked: list[str] = []

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def answer(path: str) -> Response:
        asked.append(path)
        return Response("x", status, headers)

    async with served(app) as site:
        with pytest.raises(RequestError, match="tool_server_url: cannot list its tools"):
            async with mcp_tools(site.url("/mcp"), HOSTS, timeout_s=10):
                raise AssertionError("it is none")
    assert set(asked) == {"mcp"}


@pytest.mark.parametrize(
    "url", ["http://localhost/mcp", "http://169.254.169.254/", "http://x@127.0.0.1/", "file:///etc/passwd"]
)
async def test_only_listed_hosts_are_asked(url: str) -> None:
    with pytest.raises(RequestError, match=r"^tool_server_url: "):
        async with mcp_tools(url, HOSTS, timeout_s=10):
            raise AssertionError("it is not listed")


async def test_the_address_is_checked_as_well() -> None:
    hosts = AllowedHosts(["tools.example:*"], "rollout_server.hosts")
    for address in ("169.254.169.254", "127.0.0.1"):
        with pytest.raises(RequestError, match=f"its host resolves to {address}"):
            async with mcp_tools(
                "http://tools.example/mcp", hosts, timeout_s=10, resolver=Names(tools_example=[address])
            ):
                raise AssertionError("it is a trap")


async def test_who_cancels_leaves_no_task_behind() -> None:
    hosts, opened = HOSTS, asyncio.Event()

    async def rollout() -> None:
        async with mcp_tools(site.url("/mcp"), hosts, timeout_s=20) as tools:
            opened.set()
            await ToolBox(tools, 60).run([call("hangs")])

    before = asyncio.all_tasks()
    async with served(Toolshed().app, grace_s=0.1) as site:
        task = asyncio.create_task(rollout())
        await opened.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
