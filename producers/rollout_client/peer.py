"""One HTTP peer configured by the operator: the rollout server or the gateway.

- Transport errors, 5xx, 408, 425 and 429 are retried with backoff, respecting Retry-After, until the caller's deadline;
  then PeerSilent reports the last failure.
- Any other refusal is Refused at once. A wrong key or path is the operator's error: ConfigError.
- Keys never appear in errors or log lines, even if a peer echoes them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp
import msgspec
from yarl import URL

from sluice.pipeline.config.redaction import hide_password
from sluice.pipeline.errors import ConfigError, MessageError, RequestError, SluiceError
from sluice.pipeline.http.addresses import AllowedHosts, RefusedAddress
from sluice.pipeline.logs import get_logger
from sluice.pipeline.wire.codec import read_json
from sluice.producers.http.client import guarded_session, read_bounded

GATEWAY_KEY, SERVER_KEY = KEY_NAMES = ("SLUICE_GATEWAY_API_KEY", "SLUICE_ROLLOUT_API_KEY")
_FIRST_S, _MOST_S = 0.25, 15.0
_MAX_ANSWER = 64 << 20  # bytes
_SHOWN = 300  # characters shown of a peer's own message
_AGAIN = {408, 425, 429, *range(500, 600)} - {501}


class PeerSilent(SluiceError):
    """No answer within the deadline."""


class Refused(SluiceError):
    """The peer refuses, and retrying won't help."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _Busy(Exception):
    """Retry, not before `wait_s` if the peer says so."""

    def __init__(self, trouble: str, wait_s: float = 0.0) -> None:
        super().__init__(trouble)
        self.wait_s = wait_s


class Peer:
    """Calls of one base URL; `key_name` is the environment variable that holds its key."""

    def __init__(self, session: aiohttp.ClientSession, name: str, url: str, key_name: str) -> None:
        self._session, self.name, self.url, self._key_name = session, name, url.rstrip("/"), key_name
        key = os.environ.get(key_name)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def call(
        self, method: str, path: str, body: Any = None, *, until: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The body of a 2xx answer. `until` is event loop time. Raises PeerSilent, Refused, ConfigError."""
        trouble, pause = "no answer", _FIRST_S
        try:
            async with asyncio.timeout_at(until):
                while True:
                    try:
                        return await self._once(method, path, body, headers)
                    except _Busy as busy:
                        trouble, wait_s = str(busy), busy.wait_s
                    get_logger().debug("retrying", peer=self.name, trouble=trouble)
                    await asyncio.sleep(max(pause * random.uniform(0.5, 1), wait_s))
                    pause = min(2 * pause, _MOST_S)
        except TimeoutError:
            raise PeerSilent(f"{method} {path} of {self.name} at {self.url}: out of time, {trouble}") from None

    async def is_there(self, path: str, timeout_s: float = 10.0) -> bytes | None:
        """The body of one GET, or None if nothing answers. Raises ConfigError if this isn't such a peer."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._once("GET", path, None)
        except (TimeoutError, _Busy):
            return None
        except Refused as error:
            raise ConfigError(f"{error}; is that the address of {self.name}?") from error

    async def _once(self, method: str, path: str, body: Any, more: Mapping[str, str] | None = None) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, **(more or {}), **({"Content-Type": "application/json"} if data else {})}
        try:
            async with self._session.request(method, self.url + path, data=data, headers=headers) as response:
                answer = await read_bounded(response, _MAX_ANSWER)
                self._check(method, path, response, answer)
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Busy(f"{type(error).__name__}: {str(error)[:_SHOWN]}") from error
        except (RequestError, RefusedAddress) as error:
            raise Refused(f"{method} {path} of {self.name} at {self.url}: {error}") from error

    def _check(self, method: str, path: str, response: aiohttp.ClientResponse, answer: bytes) -> None:
        status = response.status
        if status < 400:
            return
        said = _without_keys(answer.decode(errors="replace"))[:_SHOWN]
        what = f"{method} {path} of {self.name} at {self.url} answers {status}"
        if status in _AGAIN:
            raise _Busy(f"{what}: {said}", _retry_after(response))
        if status in (401, 403):
            raise ConfigError(f"{what}; set {self._key_name} to the key it expects")
        raise Refused(f"{what}: {said}", status)


def peer_session(*urls: str, timeout_s: float, pool: int) -> aiohttp.ClientSession:
    """A session restricted to these addresses, which may be this host's own. The caller closes it.

    Raises ConfigError for an invalid URL.
    """
    hosts: list[str] = []
    for text in urls:
        try:
            url = URL(text)
        except ValueError:
            url = URL()
        if url.scheme not in ("http", "https") or not url.host_subcomponent or url.raw_user or url.raw_password:
            raise ConfigError(
                f"{hide_password(text)!r} is not an address of a peer; write rollout.url and gateway_url as "
                "http://HOST:PORT"
            )
        hosts += [f"{url.host_subcomponent}:{url.port}", f"127.0.0.1:{url.port}"]
    return guarded_session(AllowedHosts(hosts, "rollout.url"), timeout_s=timeout_s, pool=pool)


def _without_keys(text: str) -> str:
    for name in KEY_NAMES:
        if key := os.environ.get(name):
            text = text.replace(key, "***")
    return text


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds; 0 if missing or a date."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


class Metrics(msgspec.Struct):
    """Part of RolloutMetrics."""

    num_llm_calls: int = 0  # turns


class Answer(msgspec.Struct):
    """Part of RolloutResponse."""

    rollout_id: str
    status: Literal["COMPLETED", "ERROR"]
    error_message: str | None = None
    reward: float | None = None  # of the whole rollout; None: the task decides
    num_turns: int | None = None  # calls that the gateway answered in it; None: not counted
    metrics: Metrics = msgspec.field(default_factory=Metrics)
    extra_fields: dict[str, Any] | None = None


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    function: _Function


class _Tools(msgspec.Struct):
    tools: list[_Tool]


def read_answer(raw: bytes, rollout_id: str) -> Answer:
    """Raises Refused for anything but this rollout's RolloutResponse."""
    try:
        answer = read_json(raw, Answer, "it")
    except MessageError as error:
        raise Refused(f"the rollout server's answer is not a RolloutResponse: {error}") from error
    if answer.rollout_id != rollout_id:
        raise Refused(f"the rollout server's answer is that of another rollout, {answer.rollout_id[:256]!r}")
    return answer


def tool_names(raw: bytes) -> list[str]:
    """From a ToolsResponse. Raises ConfigError for anything else."""
    try:
        found = read_json(raw, _Tools, "it")
    except MessageError as error:
        raise ConfigError(f"GET /tools of rollout.url is not a list of tools ({error}); correct the address") from error
    return [tool.function.name for tool in found.tools]
