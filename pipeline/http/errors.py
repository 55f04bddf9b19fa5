"""Errors in the form of OpenAI's API, which all its clients can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

_KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("not_found_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    421: ("invalid_request_error", "misdirected_request"),
    429: ("rate_limit_error", "rate_limited"),
    503: ("server_error", "unavailable"),
    504: ("server_error", "timeout"),
    507: ("server_error", "insufficient_storage"),
}


class ProblemDetail(BaseModel):
    """What went wrong, where, and what to do."""

    message: str = Field(description="For people; never contains an API key.")
    type: str = Field(description="Such as `invalid_request_error` or `server_error`.")
    param: str | None = Field(description="The path of the field, such as `messages.0.role`.")
    code: str | None = Field(description="For programs, such as `rate_limited`.")


class Problem(BaseModel):
    """Every answer that is an error."""

    error: ProblemDetail


def problem(status: int, message: str, path: str | None = None) -> dict[str, dict[str, str | None]]:
    """The body of an error; `path` is the place in the request, such as "messages.0.role"."""
    default = ("server_error", "internal_error") if status >= 500 else ("invalid_request_error", "invalid_request")
    kind, code = _KINDS.get(status, default)
    return {"error": {"message": message, "type": kind, "param": path, "code": code}}


def documented(
    texts: Mapping[int, str],
    model: type[BaseModel] = Problem,
    example: Callable[[int, str], Mapping[str, Any]] = problem,
) -> dict[int | str, dict[str, Any]]:
    """Errors of a route, for its OpenAPI page: what each status means, with an example.

    `model`, `example`: the form of the body where it isn't OpenAI's.
    """
    return {
        status: {
            "model": model,
            "description": text,
            "content": {"application/json": {"example": example(status, text)}},
        }
        for status, text in texts.items()
    }


def problem_response(
    status: int, message: str, path: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(problem(status, message, path), status, headers)
