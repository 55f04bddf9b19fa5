"""Templates → responses. A page only needs `render(request, "jobs.html.j2", rows=rows)`.

- Autoescape is on, and an undefined name is an error.
- Every page has: `monitor`, `now` (the newest Snapshot), `run`, `path`, `allow_actions`, and the filters of
  `formats.py`.
- Errors become helpful pages; for htmx and programs they are short. User input is never echoed without being escaped
  and truncated, and no traceback reaches a browser.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException as StarletteHTTPException

from sluice.consumers.dashboard import formats
from sluice.consumers.dashboard.monitor import Monitor, monitor_of
from sluice.pipeline.errors import BrokerError, SluiceError
from sluice.pipeline.http.errors import problem_response
from sluice.pipeline.logs import get_logger
from sluice.pipeline.status.descriptions import condition

HERE = Path(__file__).parent
STATIC = HERE / "static"
NAVIGATION = (
    ("/", "Overview"),
    ("/jobs", "Jobs"),
    ("/sequences", "Sequences"),
    ("/workers", "Processes"),
    ("/weights", "Weights"),
    ("/dead-letters", "Dead letters"),
    ("/config", "Config"),
)
MOST_ID = 512  # characters
MOST_CHARS = 300
MOST_CURSOR = 4000
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_TITLES = {400: "That cannot be read", 403: "Not allowed", 404: "Not here", 405: "Not allowed", 503: "Not now"}
_AWAY = "The broker does not answer. The overview shows the last known state; find the reason with `sluice doctor`."


def render(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A page, or a page fragment."""
    monitor = monitor_of(request)
    own = {"path": request.url.path, "allow_actions": request.app.state.allow_actions}
    return HTMLResponse(fragment(monitor, template, **own, **values), status)


def fragment(monitor: Monitor, template: str, **values: Any) -> str:
    """The same without a request."""
    common = {"monitor": monitor, "now": monitor.newest, "run": monitor.config.run, "state": condition(monitor.newest)}
    return templates().get_template(template).render(**common, **values)


@cache
def templates() -> Environment:
    """Compiled once per process."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(formats.FILTERS)
    made.globals.update(asset=asset, navigation=NAVIGATION)
    return made


@cache
def asset(name: str) -> str:
    """The address of a static file; it changes with the content, so browsers may cache it."""
    return f"/static/{name}?v={sha256((STATIC / name).read_bytes()).hexdigest()[:12]}"


def clean(text: str) -> str:
    """Without control characters, which no id may contain, and truncated."""
    return _CONTROL.sub("", text).strip()[:MOST_CHARS].strip()


def checked_id(text: str) -> str:
    """An id from an address; 404 if it can't be one."""
    if not text or len(text) > MOST_ID or any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise HTTPException(404, "Not a valid id: it is empty, too long, or has control characters.")
    return text


def add_problem_pages(app: FastAPI) -> None:
    """Turn every error of a route into a page."""

    async def http(request: Request, error: Any) -> Response:
        says = error.detail if error.detail != "Not Found" else "There is no such page."
        return problem_page(request, error.status_code, str(says), dict(error.headers or {}))

    async def schema(request: Request, error: Any) -> Response:
        where = ", ".join(sorted({str(part["loc"][-1]) for part in error.errors()}))
        return problem_page(request, 400, f"The address has values that cannot be read: {where}.")

    async def away(request: Request, error: Any) -> Response:
        return problem_page(request, 503, _AWAY)

    async def refused(request: Request, error: Any) -> Response:
        return problem_page(request, 400, str(error))

    async def broken(request: Request, error: Any) -> Response:
        get_logger().error("a page failed", path=request.url.path, error=repr(error))
        return problem_page(request, 500, "This page failed; the dashboard's log has the reason.")

    app.exception_handler(StarletteHTTPException)(http)
    app.exception_handler(RequestValidationError)(schema)
    for kind in (BrokerError, RedisError, OSError, TimeoutError):
        app.exception_handler(kind)(away)
    app.exception_handler(SluiceError)(refused)
    app.exception_handler(Exception)(broken)


def problem_page(request: Request, status: int, says: str, headers: dict[str, str] | None = None) -> Response:
    """The page, or a shorter form that fits the client."""
    if "HX-Request" in request.headers:
        answer = render(request, "problem_fragment.html.j2", status, says=says)
    elif "text/html" in request.headers.get("Accept", "*/*") or "*/*" in request.headers.get("Accept", "*/*"):
        title = _TITLES.get(status, "That went wrong")
        answer: Response = render(request, "problem.html.j2", status, title=title, says=says, code=status)
    else:
        return problem_response(status, says, headers=headers)
    answer.headers.update(headers or {})
    return answer
