"""The errors that callers get instead of an answer.

| status | why                                                                   |
|--------|-----------------------------------------------------------------------|
| 400    | well-formed but not supported; the message names the field            |
| 404    | no such model or rollout                                              |
| 409    | the rollout is closed or trained, or has lost turns                   |
| 422    | doesn't match the schema; `param` is the path                         |
| 429    | too many requests in progress; try again after `Retry-After` seconds  |
| 500    | the sequence died in the queue, or a bug of ours                      |
| 503    | the broker doesn't answer                                             |
| 504    | no answer in time; the message names what it waited for               |
| 507    | `images.store` is full                                                |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import RedisError
from redis.exceptions import ResponseError

from sluice.pipeline.errors import (
    BrokerError,
    BrokerRefused,
    DeadlineExceeded,
    EngineError,
    LeaseLost,
    RequestError,
    ResultsChanged,
    ResultsLost,
    SluiceError,
)
from sluice.pipeline.http.errors import problem
from sluice.pipeline.wire.messages import DeadLetter

_THEIRS = ("invalid_request",)
_MAY_PASS = (DeadlineExceeded, ResultsLost, LeaseLost)  # other errors would only repeat


class Refusal(SluiceError):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, path: str | None = None, code: str | None = None, *, final: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.path, self.code, self._final = status, path, code, final

    @property
    def headers(self) -> dict[str, str]:
        """Whether and when to retry: OpenAI's clients retry after 409 and 5xx unless a header forbids it."""
        if self._final:
            return {"x-should-retry": "false"}
        return {"Retry-After": "1"} if self.status in (429, 503) else {}

    def body(self) -> dict[str, dict[str, str | None]]:
        """In OpenAI's format."""
        body = problem(self.status, str(self), self.path)
        if self.code is not None:
            body["error"]["code"] = self.code
        return body


def refusal_of(error: Exception) -> Refusal:
    """The error as an answer."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, BrokerRefused) or type(error) is ResponseError:  # retrying would fail the same way
        return Refusal(500, f"the broker refused: {error}", final=True)
    if isinstance(error, ResultsChanged):
        return Refusal(503, f"{error}; try again: the new answer is kept")
    if isinstance(error, BrokerError | RedisError | OSError):
        return Refusal(503, "the broker does not answer; try again later, and check `sluice status`")
    if isinstance(error, RequestError):
        return Refusal(400, str(error))
    if isinstance(error, EngineError):  # too many renderings hang
        return Refusal(503, str(error))
    if isinstance(error, RecursionError):
        return Refusal(400, "the request is nested too deeply; send a flatter one")
    if isinstance(error, SluiceError):
        return Refusal(500, str(error), final=not isinstance(error, _MAY_PASS))
    return Refusal(500, f"internal error of the gateway ({type(error).__name__}); see its log", final=True)


def of_schema(problems: Sequence[Any]) -> Refusal:
    """The first of pydantic's errors, without the value that was sent."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return Refusal(422, f"the body is not JSON: {first['ctx']['error']}")
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return Refusal(422, f"{where or 'the body'}: {first['msg']}", where or None)


def of_letter(letter: DeadLetter) -> Refusal:
    """Why a sequence became a dead letter."""
    status = 400 if letter.reason in _THEIRS else 500
    message = f"the sequence was not decoded: {letter.reason}: {letter.detail}".rstrip(": ")
    return Refusal(status, message, final=letter.reason not in ("cancelled", "expired"))


def closed(rollout_id: str) -> Refusal:
    """Nothing may be added to it."""
    message = f"rollout {rollout_id} is closed; start another one with its own id"
    return Refusal(409, message, "rollout_id", final=True)


def trained(rollout_id: str) -> Refusal:
    """An earlier rollout of this id is in the weights, so the trainer would leave this one out."""
    message = f"a rollout {rollout_id} was trained in this run, which trains an id once; start this one with its own id"
    return Refusal(409, message, "rollout_id", final=True)


def parent_lost(rollout_id: str) -> Refusal:
    """The broker lost its newest writes (a power loss) while a call was decoded, the turn before it among them."""
    return Refusal(503, f"rollout {rollout_id}: the broker lost the turn before this one; try again", "rollout_id")


def turns_lost(rollout_id: str, stored: int, num_turns: int) -> Refusal:
    """The broker lost its newest writes (a power loss) with turns of it in them."""
    message = (
        f"rollout {rollout_id} has {stored} of the {num_turns} turns that were answered: the broker lost the newest. "
        "It is open: play it again from its first call (turns that are stored are repeated), or finish it with ERROR"
    )
    return Refusal(409, message, "num_turns", code="turns_lost", final=True)


def unknown(rollout_id: str) -> Refusal:
    """Nobody opened it, or it ended long ago."""
    return Refusal(404, f"rollout {rollout_id} is unknown; it never started, or ended long ago", "rollout_id")
