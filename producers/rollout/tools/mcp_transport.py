"""The MCP client's HTTP, over connections that the list of hosts allows.

The SDK speaks through httpx2, whose transports are the supported place to say how a request travels: here through
`guarded_session`, so that a tool server is reached as any other host that a request names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import httpx2

from pipeline.errors import RequestError
from pipeline.http.addresses import RefusedAddress

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
