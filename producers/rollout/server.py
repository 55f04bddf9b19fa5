"""The rollout server's HTTP API. Its errors have OpenAI's form; a rollout that fails is an answer, not an error."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from pipeline import __version__
from pipeline.errors import RequestError
from producers.http.auth import BearerAuth
from producers.http.body_limit import BodyLimit
from producers.http.errors import problem_response
from producers.rollout import strict_json
from producers.rollout.app_state import AppState
from producers.rollout.line import RETRY_AFTER_S, LineFull
from producers.rollout.routes import add_routes
from producers.rollout.runs import Conflict, Draining, Runs

_ABOUT = """\
Runs the agent loop of reinforcement learning: tools are here, the model is called back at the trainer's `server_url`.

`POST /rollout` answers when the rollout has ended; `POST /v1/rollout/init` answers at once and calls back
`{server_url}/v1/rollout/completed`. A rollout that fails is answered 200 with `status: ERROR`.
"""


def build_app(state: AppState, runs: Runs, *, key: str | None = None) -> FastAPI:
    """The application; `key` is the bearer key that callers must send, None for everybody."""
    app = FastAPI(title="Sluice rollout server", version=__version__, description=_ABOUT)
    router = APIRouter(route_class=_StrictRoute)
    add_routes(router, state, runs)
    app.include_router(router)
    _add_errors(app, state)
    app.add_middleware(BodyLimit, max_bytes=state.max_bytes)
    app.add_middleware(BearerAuth, key=key)  # the outermost: the last one added
    return app


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_strict"):
            try:
                self._strict = strict_json.decode(await self.body())
            except ValueError as error:
                raise json.JSONDecodeError(str(error), "", 0) from error
        return self._strict


class _StrictRoute(APIRoute):
    """Bodies are read by strict_json."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


def _add_errors(app: FastAPI, state: AppState) -> None:
    refused = state.counters.refused

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return problem_response(422, *_complaint(error.errors()))

    @app.exception_handler(RequestError)
    async def not_admitted(_: Request, error: RequestError) -> Response:
        where, _colon, what = str(error).partition(": ")
        return problem_response(422, f"{where}: {what}", where)

    @app.exception_handler(HTTPException)
    async def refusal(_: Request, error: HTTPException) -> Response:
        return problem_response(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(Conflict)
    async def conflict(_: Request, __: Conflict) -> Response:
        refused.labels("conflict").inc()
        message = "this rollout_id was used by another request; a repeat must have the same body and protocol"
        return problem_response(409, message, "rollout_id")

    @app.exception_handler(LineFull)
    async def full(_: Request, __: LineFull) -> Response:
        refused.labels("line_full").inc()
        message = f"{state.line.running} rollouts run and {state.line.waiting} wait; ask again later"
        return problem_response(429, message, headers={"Retry-After": str(RETRY_AFTER_S)})

    @app.exception_handler(Draining)
    async def draining(_: Request, __: Draining) -> Response:
        refused.labels("draining").inc()
        message = "the rollout server stops and takes no new rollouts; ask another one, or again later"
        return problem_response(503, message, headers={"Retry-After": str(RETRY_AFTER_S)})


def _complaint(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Words and path of the first complaint; never the input, which may be a secret."""
    first = errors[0]
    path = ".".join(str(part) for part in first["loc"] if part != "body") or None
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first['ctx']['error']}", None
    rest = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{path or 'the body'}: {first['msg']}{rest}", path
