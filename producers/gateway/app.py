"""The gateway's ASGI application.

    request ─▶ Measured ─▶ BearerAuth ─▶ HostGate ─▶ JsonOnly ─▶ BodyLimit ─▶ routes ─▶ Service

- Every error has the form of OpenAI's API; none repeats what was sent, and no body or key is logged.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from redis import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline import __version__
from pipeline.errors import SluiceError
from pipeline.http.middleware import BearerAuth, BodyLimit, HostGate, JsonOnly
from producers.gateway.metrics import Metrics
from producers.gateway.openapi import errors
from producers.gateway.refusals import Refusal, of_schema, refusal_of
from producers.gateway.routes_chat import chat_routes
from producers.gateway.routes_rollouts import rollout_routes
from producers.gateway.service import Service
from producers.http.api_page import add_api_page

_TAGS = [
    {"name": "completions", "description": "Answers of the model whose weights are served at the time."},
    {"name": "rollouts", "description": "How a rollout of several calls ends: as training data, or dropped."},
    {"name": "service", "description": "The state of this process, and its numbers."},
]


_ABOUT = """\
OpenAI's chat completions, decoded by the workers of the queue; any client of that API can ask.

Calls with the same `rollout_id` are the turns of one rollout. The sampled tokens of every turn are kept as they are;
`POST /v1/rollout/{rollout_id}/finish` publishes them as one training sequence.
"""


class Health(BaseModel):
    """Whether requests are taken."""

    status: str = Field(description="`healthy` or `unavailable`.")
    service: str = "gateway"
    in_flight: int = Field(description="Requests in hand.")
    capacity: int = Field(description="The most that are taken; one more is answered 429.")
    waiting_for: str | None = Field(default=None, description="What is missing, such as the broker.")


_HEALTH: dict[int | str, dict[str, Any]] = {
    200: {"description": "Requests are taken."},
    503: {"model": Health, "description": "The broker is away."},
}


class Measured:
    """ASGI middleware: counts answers by route and status, and their seconds until the last byte."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 499

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.monotonic() - began)


def make_app(service: Service, key: str | None) -> FastAPI:
    """`key`: the bearer key that every request but /health must bring; None: nobody is asked."""
    app = FastAPI(
        title="Sluice gateway",
        version=__version__,
        description=_ABOUT,
        openapi_tags=_TAGS,
        docs_url=None,
        redoc_url=None,
    )
    app.state.limits = service.limits
    app.add_middleware(BodyLimit, max_bytes=int(service.config.gateway.max_body_mb * (1 << 20)))
    app.add_middleware(JsonOnly)
    names = service.config.gateway.names
    app.add_middleware(HostGate, names=names, setting="gateway.names", has_key=key is not None)
    app.add_middleware(BearerAuth, key=key)
    app.add_middleware(Measured, metrics=service.metrics)
    app.include_router(chat_routes(service))
    app.include_router(rollout_routes(service))
    _service_routes(app, service)
    add_api_page(app, needs_key=key is not None)
    app.exception_handler(RequestValidationError)(_schema)
    app.exception_handler(HTTPException)(_http)
    for kind in (SluiceError, RedisError, OSError, RecursionError, Exception):
        app.exception_handler(kind)(_refused)
    return app


def _service_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["service"], summary="Whether requests are taken", responses=_HEALTH)
    async def health(response: Response) -> Health:
        """Free for everybody, also where a key is set."""
        answers = await service.broker_answers()
        response.status_code = 200 if answers else 503
        return Health(
            status="healthy" if answers else "unavailable",
            in_flight=service.gate.in_hand,
            capacity=service.gate.most,
            waiting_for=None if answers else "the broker",
        )

    @app.get(
        "/metrics",
        tags=["service"],
        summary="Numbers for Prometheus",
        response_class=PlainTextResponse,
        response_description="The numbers.",
        responses=errors(401),
    )
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _refused(request: Request, error: Any) -> JSONResponse:
    refusal = refusal_of(error)
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)


async def _schema(request: Request, error: Any) -> JSONResponse:
    refusal = of_schema(error.errors())
    return JSONResponse(refusal.body(), refusal.status)


async def _http(request: Request, error: Any) -> JSONResponse:
    return JSONResponse(Refusal(error.status_code, str(error.detail)).body(), error.status_code, error.headers)
