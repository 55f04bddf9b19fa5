"""The routes of the rollout server, with what its OpenAPI page says of them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from fastapi.openapi.models import Example

from producers.rollout.app_state import AppState
from producers.rollout.runs import Runs
from producers.rollout.schemas import (
    CancelRequest,
    InitResponse,
    RolloutRequest,
    RolloutResponse,
    StatusResponse,
    ToolsResponse,
)
from producers.rollout.schemas.constants import JsonObject

_EXAMPLE: Example = {
    "summary": "A sum",
    "value": {
        "rollout_id": "r-1",
        "server_url": "http://127.0.0.1:8081",
        "messages": [{"role": "user", "content": "What is 15 times 23?"}],
        "tokenizer_name": "policy",
        "sampling_params": {"temperature": 1.0, "max_tokens": 256},
    },
}
_Rollout = Annotated[RolloutRequest, Body(openapi_examples={"sum": _EXAMPLE})]


def _error(text: str) -> dict[str, Any]:
    problem = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}
    return {"description": text, "content": {"application/json": {"example": problem}}}


_KEY: dict[int | str, dict[str, Any]] = {401: _error("The bearer key is missing or wrong.")}
_REFUSED: dict[int | str, dict[str, Any]] = _KEY | {
    409: _error("The rollout_id was used by another request."),
    413: _error("The body is too large."),
    422: _error("The request breaks the schema, or names a host that is not listed; `param` is the path."),
    429: _error("As many rollouts wait as may; see Retry-After."),
    503: _error("The server stops and takes no new rollouts; see Retry-After."),
}
_ID_REFUSED: dict[int | str, dict[str, Any]] = _KEY | {413: _REFUSED[413], 422: _REFUSED[422]}


def add_routes(router: APIRouter, state: AppState, runs: Runs) -> None:
    """All of them."""
    _add_rollouts(router, state, runs)
    _add_looks(router, state, runs)


def _add_rollouts(router: APIRouter, state: AppState, runs: Runs) -> None:
    def admit(request: RolloutRequest) -> None:
        for where in ("server_url", "tool_server_url"):
            if (url := getattr(request, where)) is not None:
                state.hosts.admit(url, where)

    @router.post(
        "/rollout",
        tags=["rollouts"],
        summary="Run a rollout and wait for its answer",
        response_model=RolloutResponse,
        responses=_REFUSED,
    )
    async def rollout(request: _Rollout) -> Response:
        """Idempotent on `rollout_id`: a repeat joins the rollout, or is given the first answer."""
        admit(request)
        body = await asyncio.shield(runs.start(request, "sync").body)
        return Response(body, media_type="application/json")

    @router.post(
        "/v1/rollout/init",
        tags=["rollouts"],
        summary="Begin a rollout whose answer is called back",
        status_code=202,
        responses=_REFUSED,
    )
    async def init(request: _Rollout) -> InitResponse:
        """The answer goes to `{server_url}/v1/rollout/completed`, at least once, with the same body every time."""
        admit(request)
        return InitResponse(rollout_id=runs.start(request, "async").rollout_id, tools=state.tools.schemas())

    @router.post("/rollout/cancel", tags=["rollouts"], summary="End a rollout", responses=_ID_REFUSED)
    async def cancel(request: CancelRequest) -> StatusResponse:
        """It is answered as an error; one that has its answer keeps it."""
        return StatusResponse(rollout_id=request.rollout_id, status=runs.cancel(request.rollout_id))

    @router.get("/rollout/{rollout_id:path}/status", tags=["rollouts"], summary="Where a rollout is", responses=_KEY)
    async def status(rollout_id: str) -> StatusResponse:
        """`unknown` also where the answer is no longer kept."""
        return StatusResponse(rollout_id=rollout_id, status=runs.shown(rollout_id))


def _add_looks(router: APIRouter, state: AppState, runs: Runs) -> None:
    @router.get("/health", tags=["server"], summary="Whether the server takes rollouts, and how many it has")
    async def health() -> JsonObject:
        line = state.line
        return {
            "status": "draining" if runs.is_draining else "healthy",
            "service": "rollout-server",
            "in_flight": line.running,
            "waiting": line.waiting,
            "capacity": {"running": line.max_running, "waiting": line.max_waiting},
        }

    @router.get("/tools", tags=["server"], summary="The tools of every rollout", responses=_KEY)
    async def tools() -> ToolsResponse:
        return ToolsResponse(tools=state.tools.schemas())

    @router.get("/metrics", tags=["server"], summary="Numbers for Prometheus", responses=_KEY)
    async def metrics() -> Response:
        return Response(state.counters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
