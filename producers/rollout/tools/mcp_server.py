"""The tools of an MCP server, over streamable HTTP.

- The server is one that the list of hosts allows; no redirects, and its answers are bounded.
- The connection lives in a task of its own: when the server dies its calls fail, and the rollout goes on.
- Nothing that the server asks of a client (sampling, elicitation, roots) is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp.abc import AbstractResolver
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent
from mcp.types import Tool as Listed

from pipeline.errors import RequestError, first_cause
from pipeline.http.addresses import AllowedHosts
from producers.http.client import guarded_session
from producers.rollout.tools.function import Tool, ToolError
from producers.rollout.tools.mcp_transport import guarded_client

MAX_TOOLS = 256
_LEAVE_S = 5.0  # for the server to hear that its session ends


@contextlib.asynccontextmanager
async def mcp_tools(
    url: str, hosts: AllowedHosts, *, timeout_s: float, resolver: AbstractResolver | None = None
) -> AsyncIterator[list[Tool]]:
    """The server's tools while the block runs. Raises RequestError where it is not allowed or does not answer."""
    target = str(hosts.admit(url, "tool_server_url"))
    connection = _Connection(target, hosts, timeout_s, resolver)
    keeper = asyncio.create_task(connection.keep())
    try:
        await asyncio.wait({keeper, connection.tools}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not connection.tools.done():
            reason = f"no list of tools within {timeout_s:g} s"
            if keeper.done() and (error := keeper.exception()) is not None:
                cause = first_cause(error)
                reason = str(cause) or type(cause).__name__
            raise RequestError(f"tool_server_url: its tools cannot be had ({reason}); look at the tool server")
        yield connection.tools.result()
    finally:
        connection.leave.set()
        await _end(keeper)


class McpTool:
    """One tool of a server."""

    def __init__(self, client: Client, listed: Listed) -> None:
        self.name = listed.name
        described = {"name": listed.name, "description": listed.description or "", "parameters": listed.input_schema}
        self.schema: dict[str, Any] = {"type": "function", "function": described}
        self._client = client

    async def call(self, arguments: dict[str, Any]) -> str:
        """The text parts of the result. Raises ToolError where the server says that it failed."""
        try:
            result = await self._client.call_tool(self.name, arguments)
        except MCPError as error:
            raise ToolError(f"{self.name} failed at the tool server ({error.message}); try another way") from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed at the tool server; try another way")
        return text


class _Connection:
    """A session with a server; `tools` is set once it is open, `leave` ends it."""

    def __init__(self, url: str, hosts: AllowedHosts, timeout_s: float, resolver: AbstractResolver | None) -> None:
        self.tools: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self.leave = asyncio.Event()
        self._url, self._hosts, self._timeout_s, self._resolver = url, hosts, timeout_s, resolver

    async def keep(self) -> None:
        """Open it, list the tools, and keep it open until `leave`."""
        async with contextlib.AsyncExitStack() as scope:
            session = guarded_session(self._hosts, timeout_s=self._timeout_s, resolver=self._resolver)
            http = guarded_client(await scope.enter_async_context(session), self._timeout_s)
            wire = streamable_http_client(self._url, http_client=await scope.enter_async_context(http))
            client = Client(wire, read_timeout_seconds=self._timeout_s, cache=None)
            await scope.enter_async_context(client)
            self.tools.set_result(await _list(client))
            await self.leave.wait()


async def _list(client: Client) -> list[Tool]:
    found: list[Tool] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += [McpTool(client, one) for one in page.tools]
        cursor = page.next_cursor
        if len(found) > MAX_TOOLS or (cursor is not None and not page.tools):
            raise RequestError(f"it lists more than {MAX_TOOLS} tools, or pages without any")
        if cursor is None:
            return found


def _text(result: CallToolResult) -> str:
    parts = [part.text for part in result.content if isinstance(part, TextContent)]
    if not parts and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(parts)


async def _end(keeper: asyncio.Task[None]) -> None:
    """It ends in time, or is cancelled; that a server died is told by the calls that failed."""
    try:
        await asyncio.wait({keeper}, timeout=_LEAVE_S)
    finally:
        if not keeper.done():
            keeper.cancel()
            await asyncio.wait({keeper}, timeout=_LEAVE_S)
    if keeper.done() and not keeper.cancelled():
        keeper.exception()  # looked at, so that asyncio does not complain of it
