"""The rollout server's process and its ASGI application.

- A signal starts the drain: /health says so, new rollouts are refused, and running ones get most of
  `up.stop_grace_s`. The rest are handed back, or end as errors if their caller gets a callback; then the server closes.
- Errors have OpenAI's form; a rollout that fails is an answer, not an error.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from sluice import __version__
from sluice.pipeline import logs
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import RequestError
from sluice.pipeline.http.errors import problem_response
from sluice.pipeline.http.middleware import OPEN_PATHS, BearerAuth, BodyLimit, HostGate, JsonOnly
from sluice.pipeline.http.server import serve
from sluice.pipeline.logs import get_logger
from sluice.pipeline.prompts.admission import Limits
from sluice.pipeline.run.loop_watch import watch_loop
from sluice.pipeline.run.role import default_name, leave_within
from sluice.pipeline.telemetry.exporter import metrics_server
from sluice.producers.agents.routes import add_routes
from sluice.producers.agents.runs import Conflict, Draining, Runs, open_runs
from sluice.producers.agents.state import RETRY_AFTER_S, AppState, LineFull, app_state
from sluice.producers.agents.trainer_client import Retries
from sluice.producers.http import api_page
from sluice.producers.http.strict_json import StrictRoute

KEY_VARIABLE = "SLUICE_ROLLOUT_API_KEY"
_DRAIN_SHARE, _ENDING_SHARE = 0.6, 0.3  # of the grace: for running rollouts, and for reporting how the others ended
_CLOSE_S = 2.0


async def serve_rollouts(config: Config, index: int = 0) -> int | None:
    """Serve until a signal; returns the signal's number."""
    name = default_name("rollout-server")
    logs.configure(name)
    drain, caught = asyncio.Event(), list[int]()

    def on_signal(number: int) -> None:
        caught.append(number)
        drain.set()
        leave_within(config.up.stop_grace_s, name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await serve_until(config, drain, port=config.rollout_server.port + index, key=os.environ.get(KEY_VARIABLE) or None)
    return caught[0] if caught else None


async def serve_until(
    config: Config,
    drain: asyncio.Event,
    *,
    port: int,
    key: str | None = None,
    retries: Retries | None = None,
    on_ready: Callable[[int], object] | None = None,
) -> None:
    """Serve until `drain` is set and all work is done. Port 0 picks a free one, passed to `on_ready`."""
    settings, grace_s = config.rollout_server, config.up.stop_grace_s

    def ready(actual: int) -> None:
        get_logger().info("rollout server ready", host=settings.host, port=actual, tools=len(state.tools.schemas()))
        if on_ready is not None:
            on_ready(actual)

    async with app_state(config, retries) as state, open_runs(state) as runs, asyncio.TaskGroup() as tasks:
        closed = asyncio.Event()
        beside = [_drained(runs, drain, closed, grace_s), state.tokenizers.warm()]
        helpers = [tasks.create_task(one) for one in beside]
        app = build_app(state, runs, key=key)
        with watch_loop(), metrics_server(config.metrics, state.counters.telemetry) as address:
            get_logger().info("metrics", address=address)
            host, key = settings.host, "rollout_server.port"
            await serve(app, host=host, port=port, stop=closed, grace_s=_CLOSE_S, on_ready=ready, key=key)
        for helper in helpers:
            helper.cancel()


async def _drained(runs: Runs, drain: asyncio.Event, closed: asyncio.Event, grace_s: float) -> None:
    await drain.wait()
    get_logger().info("rollout server draining", grace_s=grace_s)
    await runs.drain(_DRAIN_SHARE * grace_s, _ENDING_SHARE * grace_s)
    closed.set()


_ABOUT = """\
Runs agent rollouts: query the model, run the tools it calls, return the results, repeat. The tools run here; the model
is queried at the `server_url` of the request, which is a gateway or another trainer.

`POST /rollout` answers when the rollout has ended; `POST /v1/rollout/init` answers at once and calls back
`{server_url}/v1/rollout/completed`. A rollout that fails is answered 200 with `status: ERROR`.
"""

_TAGS = [
    {"name": "rollouts", "description": "Start, query and end rollouts."},
    {"name": "server", "description": "The tools, the state of this process, and its numbers."},
]


def build_app(state: AppState, runs: Runs, *, key: str | None = None) -> FastAPI:
    """The application; `key` is the bearer key callers must send (None: no key)."""
    app = FastAPI(
        title="Sluice rollout server",
        version=__version__,
        description=_ABOUT,
        openapi_tags=_TAGS,
        docs_url=None,
        redoc_url=None,
    )
    app.state.limits = Limits(data_urls=True)
    router = APIRouter(route_class=StrictRoute)
    add_routes(router, state, runs)
    app.include_router(router)
    api_page.add_api_page(app)
    _add_errors(app, state)
    app.add_middleware(BodyLimit, max_bytes=state.max_bytes)
    app.add_middleware(JsonOnly)
    names = state.settings.names
    app.add_middleware(HostGate, names=names, setting="rollout_server.names", has_key=key is not None)
    # the last one added is the outermost
    app.add_middleware(BearerAuth, key=key, open_paths=(*OPEN_PATHS, *api_page.OPEN_PATHS))
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
        message = f"{state.line.running} rollouts are running and {state.line.waiting} are queued; try again later"
        return problem_response(429, message, headers={"Retry-After": str(RETRY_AFTER_S)})

    @app.exception_handler(Draining)
    async def draining(_: Request, __: Draining) -> Response:
        refused.labels("draining").inc()
        message = "the rollout server is shutting down and accepts no new rollouts; use another one, or try again later"
        return problem_response(503, message, headers={"Retry-After": str(RETRY_AFTER_S)})


def _complaint(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Path and text of the first error; never the input, which may be a secret."""
    first = errors[0]
    path = ".".join(str(part) for part in first["loc"] if part != "body") or None
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}", None
    rest = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{path or 'the body'}: {first['msg']}{rest}", path
