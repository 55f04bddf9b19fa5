"""The rollout server's process and its ASGI application.

- A signal starts the drain: /health says so, new rollouts are refused, and running ones get most of
  `up.stop_grace_s`. The rest are handed back, or end as errors if their caller gets a callback; then the server closes.
- Errors have OpenAI's form; a rollout that fails is an answer, not an error.
- A tool that computes, or blocks without `await`, holds up everything, and nothing inside the loop can report it. So a
  thread pings the loop (`LoopWatch`), and names the task and the line if there is no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Generator, Sequence
from types import FrameType
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


_LIMIT_S = 1.0
_STANDARD = (sysconfig.get_path("stdlib"), "<frozen")


@contextlib.contextmanager
def watch_loop(limit_s: float = _LIMIT_S) -> Generator[LoopWatch]:
    """Watch the running loop while the block runs."""
    watch = LoopWatch(asyncio.get_running_loop(), limit_s)
    watch.thread.start()
    try:
        yield watch
    finally:
        watch.stop.set()


class LoopWatch:
    """`blocked` counts how often the loop didn't respond for `limit_s`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self.blocked = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._loop, self._limit_s, self._owner = loop, limit_s, threading.get_ident()

    def _watch(self) -> None:
        while not self.stop.wait(self._limit_s / 2):
            sign, asked = threading.Event(), time.monotonic()
            try:
                self._loop.call_soon_threadsafe(sign.set)
            except RuntimeError:  # it is closed
                return
            if sign.wait(self._limit_s):
                continue
            self.blocked += 1
            task, at = self._task(), _place(sys._current_frames().get(self._owner))  # pyright: ignore[reportPrivateUsage]
            get_logger().warning("the event loop is blocked", task=task, at=at)
            while not sign.wait(self._limit_s):
                if self.stop.is_set():
                    return
            get_logger().warning(
                "the event loop is running again", task=task, blocked_s=round(time.monotonic() - asked, 2)
            )

    def _task(self) -> str:
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:  # it changed meanwhile
            return "-"
        return "-" if task is None else task.get_name()


def _place(frame: FrameType | None) -> str:
    """The innermost line outside the standard library."""
    found = frame
    while found is not None and found.f_code.co_filename.startswith(_STANDARD) and _is_library(found):
        found = found.f_back
    found = found or frame
    if found is None:
        return "-"
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    return "site-packages" not in frame.f_code.co_filename
