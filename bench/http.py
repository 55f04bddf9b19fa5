"""HTTP calls of the servers, as real callers make them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from sluice.bench.harness import until
from sluice.bench.processes import START_S, Fleet
from sluice.pipeline.errors import SluiceError

_CALL_S = 600.0
_HEALTH_S = 2.0
_DATA = b"data: "


def open_session() -> aiohttp.ClientSession:
    """A session with unlimited connections. The caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_CALL_S), trust_env=False
    )


def free_ports(count: int) -> list[int]:
    """Unused ports of this host."""
    with contextlib.ExitStack() as scope:
        taken = [scope.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]


async def until_healthy(session: aiohttp.ClientSession, url: str, fleet: Fleet) -> None:
    """Return once /health answers 200. Raises DeadlineExceeded, or SluiceError if a process has ended."""

    async def is_healthy() -> bool:
        try:
            async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=_HEALTH_S)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    await until(is_healthy, f"{url}/health", START_S, check=fleet.check)


async def get_s(session: aiohttp.ClientSession, url: str) -> float:
    """Seconds to read a whole page. Raises SluiceError unless it is a 200."""
    started = time.monotonic()
    async with session.get(url) as answer:
        _check(url, answer.status, await answer.read())
    return time.monotonic() - started


async def post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer. Raises SluiceError unless it is a 200."""
    async with _posted(session, url, body) as answer:
        data = await answer.read()
        _check(url, answer.status, data)
        return msgspec.json.decode(data)


async def first_text_s(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> float:
    """Seconds to the first text of a streamed chat completion, which is read to its end. Raises SluiceError."""
    began, first = time.perf_counter(), None
    async with _posted(session, url, {**body, "stream": True}) as answer:
        _check(url, answer.status, b"" if answer.status == 200 else await answer.read())
        async for line in answer.content:
            if first is None and line.startswith(_DATA) and _has_text(line.removeprefix(_DATA).strip()):
                first = time.perf_counter() - began
    if first is None:
        raise SluiceError(f"{url} streamed no text")
    return first


def _posted(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Any:
    return session.post(url, data=msgspec.json.encode(body), headers={"Content-Type": "application/json"})


def _check(url: str, status: int, data: bytes) -> None:
    if status != 200:
        raise SluiceError(f"{url} answered {status}: {data[:500].decode(errors='replace')}")


def _has_text(data: bytes) -> bool:
    if data == b"[DONE]":
        return False
    return any(choice["delta"].get("content") for choice in msgspec.json.decode(data)["choices"])
