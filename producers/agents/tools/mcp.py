"""The tools of an MCP server, over streamable HTTP.

- The server must be in the list of allowed hosts; no redirects, and its answers are bounded.
- The connection lives in a separate task: when the server dies its calls fail, and the rollout continues.
- The SDK uses httpx2, whose transports are the supported hook for sending requests: here through `guarded_session`, so
  the same rules apply to a tool server as to any other host that a request names.
- Requests from the server to the client (sampling, elicitation, roots) aren't answered.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx2
import msgspec
from aiohttp.abc import AbstractResolver
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, ImageContent, TextContent
from mcp.types import Tool as Listed

from sluice.pipeline.errors import RequestError, first_cause
from sluice.pipeline.http.addresses import AllowedHosts, RefusedAddress
from sluice.producers.agents.tools.function import Tool, ToolError, ToolResult
from sluice.producers.agents.tools.image import ToolImage
from sluice.producers.http.client import guarded_session

MAX_TOOLS = 256
_LEAVE_S = 5.0  # for the server to hear that its session ends


@contextlib.asynccontextmanager
async def mcp_tools(
    url: str, hosts: AllowedHosts, *, timeout_s: float, resolver: AbstractResolver | None = None
) -> AsyncIterator[list[Tool]]:
    """The server's tools while the block runs. Raises RequestError if it isn't allowed or doesn't answer."""
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
            raise RequestError(f"tool_server_url: cannot list its tools ({reason}); check the tool server")
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

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """The texts and images of the result. Raises ToolError where the server says that it failed."""
        try:
            result = await self._client.call_tool(self.name, arguments)
        except MCPError as error:
            raise ToolError(f"{self.name} failed at the tool server ({error.message}); try another way") from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed at the tool server; try another way")
        if not any(isinstance(part, ImageContent) for part in result.content):
            return text
        shown: list[str | ToolImage] = []
        for part in result.content:
            if isinstance(part, TextContent):
                shown.append(part.text)
            elif isinstance(part, ImageContent):
                shown.append(_image(part, self.name))
        return shown


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
            raise RequestError(f"it lists more than {MAX_TOOLS} tools, or empty pages")
        if cursor is None:
            return found


def _text(result: CallToolResult) -> str:
    parts = [part.text for part in result.content if isinstance(part, TextContent)]
    if not parts and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(parts)


def _image(part: ImageContent, name: str) -> ToolImage:
    try:
        return ToolImage(data=binascii.a2b_base64(part.data, strict_mode=True))
    except ValueError as error:
        raise ToolError(f"{name} returned an image that can't be shown; try another way") from error


async def _end(keeper: asyncio.Task[None]) -> None:
    """Let it end in time, or cancel it; the failed calls have already reported a dead server."""
    try:
        await asyncio.wait({keeper}, timeout=_LEAVE_S)
    finally:
        if not keeper.done():
            keeper.cancel()
            await asyncio.wait({keeper}, timeout=_LEAVE_S)
    if keeper.done() and not keeper.cancelled():
        keeper.exception()  # retrieved, so asyncio doesn't complain about it


MAX_ANSWER_BYTES = 16 * 2**20
_OURS = frozenset({"accept-encoding", "connection", "content-length", "host", "user-agent"})


def guarded_client(session: aiohttp.ClientSession, timeout_s: float) -> httpx2.AsyncClient:
    """The client for the SDK; nothing of the environment is read. The session's owner closes the connections."""
    return httpx2.AsyncClient(transport=GuardedTransport(session, timeout_s), trust_env=False, timeout=None)


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Requests of httpx2 sent by aiohttp; `timeout_s` without a byte ends one."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        headers = [(name, value) for name, value in request.headers.multi_items() if name.lower() not in _OURS]
        body = await request.aread()
        try:
            response = await self._session.request(
                request.method,
                str(request.url),
                data=body or None,
                headers=headers,
                allow_redirects=False,
                timeout=self._timeout,
            )
        except (RequestError, RefusedAddress, aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise httpx2.ConnectError(str(error) or type(error).__name__) from error
        return httpx2.Response(response.status, headers=list(response.raw_headers), stream=_Body(response))


class BrokenAnswer(httpx2.StreamError):
    """An answer that broke off or is too large. The SDK fails the one call; a transport error would end them all."""


class _Body(httpx2.AsyncByteStream):
    """Bytes as they come, at most MAX_ANSWER_BYTES."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        try:
            async for chunk in self._response.content.iter_any():
                num_bytes += len(chunk)
                if num_bytes > MAX_ANSWER_BYTES:
                    raise BrokenAnswer(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenAnswer(str(error) or type(error).__name__) from error

    async def aclose(self) -> None:
        self._response.close()
