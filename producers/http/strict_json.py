"""JSON from the network: RFC 8259 only, so anything read can be passed on and written again.

- No NaN or infinity, no lone surrogates, no number beyond the supported types. Output is ASCII.
- A body's cost is checked before it is parsed into objects (pipeline/prompts/admission.py), with the limits in the
  application's state, if any.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from sluice.pipeline.errors import RequestError
from sluice.pipeline.prompts.admission import Limits, admit_json, admit_request
from sluice.pipeline.wire.codec import lone_surrogate_in_json, too_wide


def decode(body: bytes) -> Any:
    """The value. Raises ValueError saying what is wrong, RequestError if it costs too much."""
    try:
        admit_json(body, "the body")
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(lone_surrogate_in_json(body, "the body") or str(error)) from error
    if problem := too_wide(body, value, "the body"):
        raise ValueError(problem)
    return value


class StrictRoute(APIRoute):
    """Bodies are parsed by `decode`; errors become a RequestValidationError of type json_invalid."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_strict"):
            try:
                self._strict = decode(await self.body())
                admit_request(self._strict, getattr(self.app.state, "limits", Limits()))
            except RequestError as error:
                raise HTTPException(413, str(error)) from error
            except ValueError as error:
                raise json.JSONDecodeError(str(error), "", 0) from error
        return self._strict


def encode(value: Any) -> bytes:
    """ASCII, without spaces."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def what_is_wrong(error: ValidationError) -> tuple[str, str]:
    """Path and message of the first error, without the input, which may be a secret."""
    first, *more = error.errors(include_input=False, include_url=False, include_context=False)
    rest = f" (and {len(more)} more)" if more else ""
    return ".".join(map(str, first["loc"])), first["msg"] + rest
