"""Templates → answers. `render(request, "jobs.html.j2", rows=rows)` is all that a page needs.

- Autoescape is on and a name that is not given is an error.
- Every page has: `look`, `now` (the newest Snapshot), `run`, `path`, `allow_actions`, and the filters of `words.py`.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from consumers.dashboard import words
from consumers.dashboard.look import Look, look_of
from pipeline.status.text import condition

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


def render(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A page, or a fragment of one."""
    look = look_of(request)
    own = {"path": request.url.path, "allow_actions": request.app.state.allow_actions}
    return HTMLResponse(fragment(look, template, **own, **values), status)


def fragment(look: Look, template: str, **values: Any) -> str:
    """The same without a request."""
    common = {"look": look, "now": look.newest, "run": look.config.run, "state": condition(look.newest)}
    return templates().get_template(template).render(**common, **values)


@cache
def templates() -> Environment:
    """Compiled once a process."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(words.FILTERS)
    made.globals.update(asset=asset, navigation=NAVIGATION)
    return made


@cache
def asset(name: str) -> str:
    """The address of a static file; it changes with the file, so browsers may keep it."""
    return f"/static/{name}?v={sha256((STATIC / name).read_bytes()).hexdigest()[:12]}"
