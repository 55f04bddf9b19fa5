"""The gateway's process: its tasks and its ASGI application.

    request ─▶ Measured ─▶ MessagesErrors ─▶ BearerAuth ─▶ HostGate ─▶ JsonOnly ─▶ BodyLimit ─▶ routes ─▶ Service

| waits for       | unblocked by         |
|-----------------|----------------------|
| requests        | a caller             |
| requests to end | workers (draining)   |

- Every error has OpenAI's format; none repeats what was sent, and no body or key is logged.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from redis import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse

from sluice import __version__
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.http.middleware import OPEN_PATHS, BearerAuth, BodyLimit, HostGate, JsonOnly
from sluice.pipeline.http.server import serve
from sluice.pipeline.logs import get_logger
from sluice.pipeline.run.imports import import_slow
from sluice.pipeline.run.role import Role, default_name, role_process
from sluice.pipeline.thread_pool import lost_threads
from sluice.pipeline.wire.waits import WaitKind
from sluice.producers.gateway.apis.chat_completions import chat_routes
from sluice.producers.gateway.apis.completions import completion_routes
from sluice.producers.gateway.apis.infer import infer_routes
from sluice.producers.gateway.apis.messages import MESSAGES_PATHS, MessagesErrors, message_routes
from sluice.producers.gateway.apis.openapi import errors
from sluice.producers.gateway.apis.responses import response_routes
from sluice.producers.gateway.apis.rollouts import rollout_routes
from sluice.producers.gateway.apis.tokens import token_routes
from sluice.producers.gateway.metrics import Measured
from sluice.producers.gateway.refusals import Refusal, of_schema, refusal_of
from sluice.producers.gateway.service import Service, make_service
from sluice.producers.http import api_page
from sluice.producers.tokenizer import load_policy_tokenizer

KEY_NAME = "SLUICE_GATEWAY_API_KEY"
_SWEEP_S = 5.0
_REPORT_S = 1.0
_SWEPT_AT_ONCE = 100
_GRACE = 0.8  # of the process's stop time; the rest is for the shutdown itself


async def gateway(config: Config, index: int = 0, stop: asyncio.Event | None = None) -> None:
    """Serve until asked to stop, by a signal or by the given event."""
    async with role_process(config, "gateway", default_name("gateway"), stop) as role:
        port = config.gateway.port + index if config.gateway.port else 0
        role.status.waiting(WaitKind.TOKENIZER, config.model.path)
        await asyncio.to_thread(import_slow)
        await run_gateway(role, port, lambda port: get_logger().info("gateway ready", port=port))


async def run_gateway(role: Role, port: int, on_ready: Callable[[int], object] | None = None) -> None:
    """The gateway inside a role."""
    config = role.config
    role.status.waiting(WaitKind.TOKENIZER, config.model.path)
    renderer = await asyncio.to_thread(load_policy_tokenizer, config.model)
    service = make_service(config, role.client, role.keys, renderer, role.telemetry.registry, role.tracing, role.name)
    role.spawn(service.replies.run())
    role.spawn(service.decoding.run())
    role.spawn(_sweep(role, service))
    role.spawn(_report(role, service))
    app = make_app(service, os.environ.get(KEY_NAME) or None)
    grace_s = _GRACE * config.up.stop_grace_s
    try:
        host, key = config.gateway.host, "gateway.port"
        await serve(app, host=host, port=port, stop=role.stop, grace_s=grace_s, on_ready=on_ready, key=key)
        await service.decoding.settle()
    finally:
        service.chat.close()
        service.images.close()


async def _sweep(role: Role, service: Service) -> None:
    """Drop abandoned rollouts, and count open ones."""
    while True:
        while (swept := await service.rollouts.sweep()) > 0:
            get_logger().warning("rollouts abandoned", count=swept)
            service.metrics.rollouts.labels("dropped").inc(swept)
            if swept < _SWEPT_AT_ONCE:
                break
        role.status.fact(rollouts=int(await cast(Any, role.client).zcard(role.keys.rollouts)))
        await asyncio.sleep(_SWEEP_S)


async def _report(role: Role, service: Service) -> None:
    while True:
        busy = service.gate.in_hand
        role.status.fact(requests=busy)
        if role.stop.is_set():
            role.status.waiting(WaitKind.DRAIN, "requests", busy)
        else:
            role.status.waiting(None if busy else WaitKind.REQUESTS)
        await asyncio.sleep(_REPORT_S)


_TAGS = [
    {"name": "completions", "description": "Answers from the model, with the weights served at the time."},
    {"name": "agents", "description": "The same for agents that speak another API than chat completions."},
    {"name": "tokens", "description": "The same in text or token ids, without a chat, and the tokenizer."},
    {"name": "rollouts", "description": "End a rollout of several calls: publish it for training, or drop it."},
    {"name": "service", "description": "The state of this process, and its numbers."},
]

_ROUTES = (
    chat_routes, infer_routes, completion_routes, token_routes, message_routes, response_routes, rollout_routes,
)  # fmt: skip

_ABOUT = """\
OpenAI's completions and vLLM's token routes, decoded by the workers of the queue; any client of these APIs can ask.

Calls with the same `rollout_id` are the turns of one rollout. The sampled tokens of every turn are kept as they are;
`POST /v1/rollout/{rollout_id}/finish` publishes them as one training sequence.
"""


class Health(BaseModel):
    """Whether requests are accepted."""

    status: str = Field(description="`healthy` or `unavailable`.")
    service: str = "gateway"
    in_flight: int = Field(description="Requests in progress.")
    capacity: int = Field(description="Limit of requests in progress; more get 429.")
    lost_threads: int = Field(description="Renderings still running after their deadline.")
    waiting_for: str | None = Field(default=None, description="What is missing, such as the broker.")


_HEALTH: dict[int | str, dict[str, Any]] = {
    200: {"description": "Requests are accepted."},
    503: {"model": Health, "description": "The broker is unavailable."},
}


def make_app(service: Service, key: str | None) -> FastAPI:
    """`key`: the bearer key of every request except /health and the page at /docs; None: no key needed."""
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
    app.add_middleware(BearerAuth, key=key, open_paths=(*OPEN_PATHS, *api_page.OPEN_PATHS))
    app.add_middleware(MessagesErrors, paths=MESSAGES_PATHS)
    app.add_middleware(Measured, metrics=service.metrics, tracing=service.tracing, name=service.name)
    for routes in _ROUTES:
        app.include_router(routes(service))
    _service_routes(app, service)
    api_page.add_api_page(app)
    app.exception_handler(RequestValidationError)(_schema)
    app.exception_handler(HTTPException)(_http)
    for kind in (SluiceError, RedisError, OSError, RecursionError, Exception):
        app.exception_handler(kind)(_refused)
    return app


def _service_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["service"], summary="Whether requests are accepted", responses=_HEALTH)
    async def health(response: Response) -> Health:
        """Needs no key, even if one is set."""
        answers = await service.broker_answers()
        response.status_code = 200 if answers else 503
        return Health(
            status="healthy" if answers else "unavailable",
            in_flight=service.gate.in_hand,
            capacity=service.gate.most,
            lost_threads=lost_threads(),
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
        """In Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _refused(request: Request, error: Any) -> JSONResponse:
    refusal = refusal_of(error)
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)


async def _schema(request: Request, error: Any) -> JSONResponse:
    refusal = of_schema(error.errors())
    return JSONResponse(refusal.body(), refusal.status)


async def _http(request: Request, error: Any) -> JSONResponse:
    return JSONResponse(Refusal(error.status_code, str(error.detail)).body(), error.status_code, error.headers)
