"""Images over HTTP, from listed hosts.

- One pooled session, created at the first fetch: no cookies, no proxies or passwords from the environment, no
  redirects, no decompression.
- Bytes are counted as they arrive; the length a server declares is only a reason to stop sooner.
- A connection that fails or stalls, and a 408, 425, 429 or 5xx, are retried, not before a server's Retry-After; all
  tries together share one time limit. A longer Retry-After is passed on to the caller.
"""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.http.addresses import AllowedHosts, RefusedAddress
from sluice.pipeline.images.paths import SourceUnavailable, too_large

PAUSES_S = (0.2, 0.6)
"""Before the second and the third try."""

_CONNECTIONS = 64
_MAY_PASS = (408, 425, 429)
_LONGEST_S = 60.0  # of a server's Retry-After
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "sluice"}


class ServerTrouble(Exception):
    """An answer that may be better on the next try, after so many seconds."""

    def __init__(self, message: str, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s


class UrlFetcher:
    """Fetches allow-listed URLs; belongs to one event loop."""

    def __init__(self, config: ImagesConfig, resolver: AbstractResolver | None = None) -> None:
        """`resolver` replaces the system's."""
        self._hosts = AllowedHosts(config.hosts, "images.hosts")
        self._max_bytes = int(config.max_mb * 2**20)
        self._timeout_s = config.fetch_timeout_s
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, text: str, where: str) -> bytes:
        """The body of a 200 answer. Raises RequestError, SourceUnavailable if the server can't be asked now."""
        url = self._hosts.admit(text, where)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._try(url, where)
        except TimeoutError as error:
            raise SourceUnavailable(
                f"{where}: not fetched within {self._timeout_s:g} s (images.fetch_timeout_s); check the server"
            ) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _try(self, url: URL, where: str) -> bytes:
        pauses, tries, until = iter(PAUSES_S), 0, time.monotonic() + self._timeout_s
        while True:
            tries += 1
            try:
                return await self._once(url, where)
            except RefusedAddress as error:
                raise RequestError(f"{where}: {error}") from error
            except (ValueError, aiohttp.ClientConnectorCertificateError) as error:
                raise RequestError(f"{where}: cannot be fetched ({error}); correct the URL or the server") from error
            except (aiohttp.ClientError, ServerTrouble, OSError) as error:  # TimeoutError is an OSError
                after_s = error.after_s if isinstance(error, ServerTrouble) else 0.0
                pause_s = next(pauses, None)
                if pause_s is None or time.monotonic() + after_s >= until:
                    trouble, often = str(error) or type(error).__name__, "once" if tries == 1 else f"{tries} times"
                    raise SourceUnavailable(f"{where}: {trouble}, {often}; check the server", after_s) from error
            await asyncio.sleep(max(pause_s, after_s))

    async def _once(self, url: URL, where: str) -> bytes:
        async with self._open_session().get(url, allow_redirects=False) as response:
            status = response.status
            if status >= 500 or status in _MAY_PASS:
                after_s = _retry_after_s(response.headers.get("Retry-After", ""))
                asks = f" (Retry-After: {after_s:.0f} s)" if after_s else ""
                raise ServerTrouble(f"the server answered {status}{asks}", after_s)
            if 300 <= status < 400:
                raise RequestError(
                    f"{where}: the server answered {status}, redirects are not followed; give the final URL"
                )
            if status != 200:
                raise RequestError(f"{where}: the server answered {status}; check the URL and the server's permissions")
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise RequestError(f"{where}: is compressed ({encoding[:20]!r}); have the server send it uncompressed")
            return await self._body(response, where)

    async def _body(self, response: aiohttp.ClientResponse, where: str) -> bytes:
        if (response.content_length or 0) > self._max_bytes:
            raise too_large(response.content_length or 0, self._max_bytes, where)
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self._max_bytes:
                raise too_large(len(body), self._max_bytes, where)
        return bytes(body)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            step_s = self._timeout_s / (len(PAUSES_S) + 1)
            self._session = aiohttp.ClientSession(
                connector=self._hosts.connector(_CONNECTIONS, self._resolver),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=step_s, sock_read=step_s),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


def _retry_after_s(header: str) -> float:
    """Seconds of a Retry-After header, at most a minute; 0 if there is none, or nothing that can be read."""
    try:
        seconds = header.strip().isdecimal()
        wanted_s = float(header) if seconds else parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(0.0, wanted_s), _LONGEST_S)
