"""The rollout server's HTTP API. Its errors have OpenAI's form; a rollout that fails is an answer, not an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pipeline import __version__
from pipeline.errors import RequestError
from pipeline.http.errors import problem_response
from pipeline.http.middleware import BearerAuth, BodyLimit, HostGate, JsonOnly
from producers.http.api_page import add_api_page
from producers.http.strict_json import StrictRoute
from producers.rollout.app_state import AppState
from producers.rollout.line import RETRY_AFTER_S, LineFull
from producers.rollout.routes import add_routes
from producers.rollout.runs import Conflict, Draining, Runs

_ABOUT = """\
Runs agent rollouts: ask the model, run the tools that it calls, show it the results, ask again. The tools are here; the
model is asked at the `server_url` of the request, which is a gateway or another trainer.

`POST /rollout` answers when the rollout has ended; `POST /v1/rollout/init` answers at once and calls back
`{server_url}/v1/rollout/completed`. A rollout that fails is answered 200 with `status: ERROR`.
"""

_TAGS = [
    {"name": "rollouts", "description": "Begin rollouts, look after them, end them."},
    {"name": "server", "description": "The tools, the state of this process, and its numbers."},
]


def build_app(state: AppState, runs: Runs, *, key: str | None = None) -> FastAPI:
    """The application; `key` is the bearer key that callers must send, None for everybody."""
    app = FastAPI(
        title="Sluice rollout server",
        version=__version__,
        description=_ABOUT,
        openapi_tags=_TAGS,
        docs_url=None,
        redoc_url=None,
    )
    router = APIRouter(route_class=StrictRoute)
    add_routes(router, state, runs)
    app.include_router(router)
    add_api_page(app, needs_key=key is not None)
    _add_errors(app, state)
    app.add_middleware(BodyLimit, max_bytes=state.max_bytes)
    app.add_middleware(JsonOnly)
    names = state.settings.names
    app.add_middleware(HostGate, names=names, setting="rollout_server.names", has_key=key is not None)
    app.add_middleware(BearerAuth, key=key)  # the outermost: the last one added
    return app


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
