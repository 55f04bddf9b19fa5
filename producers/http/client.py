"""HTTP to hosts named in a request: only listed ones, at safe addresses.

- Every URL is checked against the list before the request, and every address when its socket is opened.
- No redirects; no proxies, cookies or passwords from the environment; no compressed answers, so the bytes counted are
  the bytes read.
- TLS names are always verified; no setting turns that off.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver

from sluice.pipeline.errors import MessageError, RequestError
from sluice.pipeline.http.addresses import AllowedHosts
from sluice.pipeline.wire import codec

_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "sluice"}


def guarded_session(
    hosts: AllowedHosts, *, timeout_s: float, pool: int = 100, resolver: AbstractResolver | None = None
) -> aiohttp.ClientSession:
    """A pooled session of the running event loop; `timeout_s` applies per request. The caller closes it.

    Its requests raise RequestError (not listed, a redirect, compressed), RefusedAddress
    (pipeline/http/addresses.py), and aiohttp's errors.
    """

    async def guard(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        hosts.admit(str(request.url), "the URL")
        response = await handler(request)
        if refused := _refusal(response):
            response.close()
            raise RequestError(f"the URL: {refused}")
        return response

    return aiohttp.ClientSession(
        connector=hosts.connector(pool, resolver),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=_HEADERS,
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 30.0)),
        auto_decompress=False,
        trust_env=False,
        middlewares=(guard,),
    )


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body. Raises RequestError beyond `max_bytes`, whatever length the server declares."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            response.close()
            raise RequestError(f"the URL: the answer is larger than {max_bytes} bytes; check the server")
    return bytes(body)


async def read_json(response: aiohttp.ClientResponse, max_bytes: int) -> Any:
    """The body as JSON. Raises RequestError if it is too large or not JSON."""
    body = await read_bounded(response, max_bytes)
    try:
        return codec.read_json(body, object, "it")
    except MessageError as error:
        raise RequestError(f"the URL: the answer is not JSON ({error}); check the server") from error


def _refusal(response: aiohttp.ClientResponse) -> str | None:
    if 300 <= response.status < 400:
        return f"the server answered {response.status}, redirects are not followed; give the final URL"
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        return f"the answer is compressed ({encoding[:20]!r}); have the server send it uncompressed"
    return None
