"""The trainer's HTTP side, as one rollout sees it.

- Transport errors, 5xx and 429 (after its Retry-After) are retried with growing pauses; other answers aren't, nor any
  with `x-should-retry: false`, which OpenAI's clients also honour.
- Retries stop at the deadline, or after `patience_s` of consecutive failures; a full trainer (429) isn't a failure.
  Callbacks are retried until the deadline, because nobody would request them again.
- The bearer key appears only in the header: no log line, error or repr contains it, whatever the trainer answers.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol
from urllib.parse import quote

import aiohttp
from pydantic import ValidationError
from yarl import URL

from sluice.pipeline.errors import RequestError
from sluice.pipeline.http.addresses import RefusedAddress
from sluice.pipeline.logs import get_logger
from sluice.producers.http import strict_json
from sluice.producers.http.client import read_bounded
from sluice.producers.http.schemas import (
    CompletionsRequest,
    CompletionsResponse,
    ErrorCategory,
    RolloutError,
    RolloutRequest,
)

_EXCERPT = 300  # characters of a trainer's answer quoted in an error


@dataclass(frozen=True)
class Retries:
    """Pauses between tries, in seconds."""

    first_s: float = 0.2
    most_s: float = 5.0
    # Of consecutive failures. Longer than several restarts: one that is killed again as it comes up misses every try.
    patience_s: float = 240.0
    ending_s: float = 5.0  # for reporting a rollout's end after its deadline


@dataclass(frozen=True)
class Clock:
    """Seconds, and how they pass: a test of long outages has its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Trainer(Protocol):
    """What a rollout needs from its trainer; `until` is on the time.monotonic() clock.

    `held_up`: the refusal that the time of a call went on, if its deadline comes during the last, short try.
    """

    held_up: RolloutError | None

    async def complete(self, call: CompletionsRequest, *, until: float) -> CompletionsResponse:
        """The model's next turn. Raises RolloutError."""
        ...

    async def finish(
        self, final_status: str, *, until: float, reward: float | None = None, num_turns: int | None = None
    ) -> bool:
        """Close the rollout; False if the trainer has no such route. Raises RolloutError."""
        ...

    async def completed(self, body: bytes, *, until: float) -> None:
        """Deliver the answer of the asynchronous protocol. Raises RolloutError."""
        ...


class TrainerClient:
    """Calls of one rollout; `until` is on the clock."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        request: RolloutRequest,
        *,
        max_bytes: int,
        retries: Retries,
        on_retry: Callable[[str], None] = lambda reason: None,
        clock: Clock = Clock(),
    ) -> None:
        self._clock = clock
        self._session, self._max_bytes, self._retries, self._on_retry = session, max_bytes, retries, on_retry
        self._base, self._rollout_id = request.server_url, request.rollout_id
        self._key = None if request.callback_api_key is None else request.callback_api_key.get_secret_value()
        self.held_up: RolloutError | None = None

    async def complete(self, call: CompletionsRequest, *, until: float) -> CompletionsResponse:
        """The model's next turn. Raises RolloutError."""
        body = call.model_dump(mode="json", exclude={"messages"}) | {"messages": [one.plain() for one in call.messages]}
        answer = await self._post("/v1/chat/completions", strict_json.encode(body), until)
        try:
            return CompletionsResponse.model_validate(strict_json.decode(answer))
        except ValidationError as error:
            where, what = strict_json.what_is_wrong(error)
            raise RolloutError("validation_error", f"the trainer's reply: {where}: {what}") from error
        except RequestError as error:
            raise RolloutError("validation_error", f"the trainer's reply is too expensive to parse: {error}") from error
        except ValueError as error:
            raise RolloutError("validation_error", f"the trainer's reply is not JSON: {error}") from error

    async def finish(
        self, final_status: str, *, until: float, reward: float | None = None, num_turns: int | None = None
    ) -> bool:
        """Close the rollout at the trainer; False if it has no such route. Raises RolloutError."""
        path = f"/v1/rollout/{_segment(self._rollout_id)}/finish"
        counted = {"reward": reward, "num_turns": num_turns}
        said = {"final_status": final_status} | {name: value for name, value in counted.items() if value is not None}
        try:
            await self._post(path, strict_json.encode(said), until)
        except RolloutError as error:
            if error.http_status in (404, 405):
                return False
            raise
        return True

    async def completed(self, body: bytes, *, until: float) -> None:
        """Deliver the answer of the asynchronous protocol. Raises RolloutError."""
        await self._post("/v1/rollout/completed", body, until, patience_s=math.inf)

    async def _post(self, path: str, body: bytes, until: float, patience_s: float | None = None) -> bytes:
        pause, failing_since = self._retries.first_s, None
        patience_s = self._retries.patience_s if patience_s is None else patience_s
        refused: RolloutError | None = None
        while True:
            is_last = until - self._clock.now() < 2 * self._retries.most_s
            self.held_up = refused if is_last else None
            try:
                answer = await self._try(path, body, until)
                self.held_up = None
                return answer
            except RolloutError as error:
                if error.category == "timeout" and self.held_up is not None:
                    raise self.held_up from error
                raise
            except _Again as again:
                refused = again.error
                now, wait = self._clock.now(), max(again.after_s, pause * random.uniform(0.75, 1.25))
                full = again.error.category == "rate_limited"
                if full:
                    failing_since = None
                elif failing_since is None:
                    failing_since = now
                patient = failing_since is None or now + wait - failing_since <= patience_s
                if not patient or now + wait >= until:
                    raise again.error from again
                self._on_retry(again.error.category)
                get_logger().warning("retrying the trainer", rollout=self._rollout_id, why=str(again.error), in_s=wait)
                await self._clock.sleep(wait)
                pause = min(2 * pause, self._retries.most_s)

    async def _try(self, path: str, body: bytes, until: float) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        url, left = URL(self._base + path, encoded=True), until - self._clock.now()
        if left <= 0:
            raise RolloutError("timeout", f"no time was left to call {path} of the trainer")
        try:
            async with (
                asyncio.timeout(left),
                self._session.post(url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                answer = await read_bounded(response, self._max_bytes)
                if 200 <= response.status < 300:
                    return answer
                raise self._refusal(path, response, answer)
        except TimeoutError as error:  # a subclass of OSError, so first
            raise RolloutError("timeout", f"{path}: the trainer did not answer in time") from error
        except RequestError as error:
            raise RolloutError("validation_error", f"{path}: {self._safe(str(error))}") from error
        except (ValueError, RefusedAddress) as error:  # aiohttp.InvalidURL is one
            raise RolloutError("validation_error", f"{path}: not called: {self._safe(str(error))}") from error
        except (aiohttp.ClientError, OSError) as error:
            why = self._safe(f"{type(error).__name__}: {error}")
            raise _Again(RolloutError("network_error", f"{path}: the trainer cannot be reached ({why})")) from error

    def _refusal(self, path: str, response: aiohttp.ClientResponse, answer: bytes) -> Exception:
        status, said = response.status, self._safe(answer.decode("utf-8", "replace"))
        category: ErrorCategory = "trainer_server_error" if status >= 500 else "trainer_client_error"
        if status == 429:
            category = "rate_limited"
        elif status == 400 and '"mask_error"' in said:  # the gateway's code for it
            category = "mask_error"
        error = RolloutError(category, f"{path}: the trainer answered {status}: {said}", status)
        if category in ("trainer_client_error", "mask_error") or response.headers.get("x-should-retry") == "false":
            return error
        return _Again(error, retry_after_s(response.headers.get("Retry-After")))

    def _safe(self, text: str) -> str:
        """The peer's text, without the key in case it repeats it."""
        return (text if self._key is None else text.replace(self._key, "***"))[:_EXCERPT]


class _Again(Exception):
    """Worth another try."""

    def __init__(self, error: RolloutError, after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.after_s = error, after_s


def retry_after_s(value: str | None) -> float:
    """Seconds of a Retry-After header, as a number or a date; 0 if it is missing or invalid."""
    if value is None:
        return 0.0
    if value.strip().isascii() and value.strip().isdigit():
        return float(value.strip()[:9])
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _segment(rollout_id: str) -> str:
    """As one path segment that no server resolves as `..`."""
    return quote(rollout_id, safe="").replace(".", "%2E") if set(rollout_id) == {"."} else quote(rollout_id, safe="")
