"""Errors in the form of OpenAI's API, which every client of it can read."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import JSONResponse

_KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("not_found_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limited"),
    503: ("server_error", "unavailable"),
    504: ("server_error", "timeout"),
}


def problem(status: int, message: str, path: str | None = None) -> dict[str, dict[str, str | None]]:
    """The body of an error; `path` is the place in the request, such as "messages.0.role"."""
    default = ("server_error", "internal_error") if status >= 500 else ("invalid_request_error", "invalid_request")
    kind, code = _KINDS.get(status, default)
    return {"error": {"message": message, "type": kind, "param": path, "code": code}}


def problem_response(
    status: int, message: str, path: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The whole answer."""
    return JSONResponse(problem(status, message, path), status, headers)
