"""The dashboard's ASGI application.

    request ─▶ SafeHeaders ─▶ Gate ─▶ HostGate ─▶ BodyLimit ─▶ routes ─▶ Look, HistoryReader

- A page module has `router`, and is listed in `PAGES`; what it renders extends templates/base.html.j2.
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.staticfiles import StaticFiles

from consumers.dashboard import (
    actions,
    events,
    jobs,
    letters,
    metrics,
    overview,
    sequences,
    settings,
    weights,
    workers,
)
from consumers.dashboard.auth import Gate
from consumers.dashboard.headers import SafeHeaders
from consumers.dashboard.live import Live
from consumers.dashboard.look import Look
from consumers.dashboard.problems import add_problem_pages
from consumers.dashboard.render import STATIC
from pipeline import __version__
from pipeline.http.asgi import ASGIApp
from pipeline.http.middleware import BodyLimit, HostGate

PAGES = (overview, jobs, sequences, workers, weights, letters, actions, settings, events, metrics)


def make_app(look: Look, key: str | None = None, *, allow_actions: bool = False) -> ASGIApp:
    """`key`: what every request but /health must bring; None: only this machine may ask, see auth.py."""
    config = look.config.dashboard
    app = FastAPI(title="Sluice dashboard", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.look, app.state.allow_actions = look, allow_actions
    app.state.live = Live(look)
    app.add_middleware(BodyLimit, max_bytes=int(config.max_body_mb * (1 << 20)))
    app.add_middleware(HostGate, names=config.hosts, setting="dashboard.hosts", has_key=key is not None)
    app.add_middleware(Gate, key=key)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_api_route("/health", lambda: _health(look))
    for page in PAGES:
        app.include_router(page.router)
    add_problem_pages(app)
    return SafeHeaders(app)  # not as middleware: the page of an error nobody expected is made outside of those


def _health(look: Look) -> JSONResponse:
    healthy = look.problem is None
    answer = {"status": "healthy" if healthy else "unavailable", "service": "dashboard", "waiting_for": look.problem}
    return JSONResponse(answer, 200 if healthy else 503)
