"""The routes of the rollout server, and their texts on its OpenAPI page."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Path, Response
from fastapi.openapi.models import Example
from fastapi.responses import PlainTextResponse
from pydantic import Field

from sluice.pipeline.http.errors import documented
from sluice.pipeline.prompts.admission import Limits, admit_prompt
from sluice.pipeline.thread_pool import lost_threads
from sluice.producers.agents.runs import Runs
from sluice.producers.agents.state import AppState
from sluice.producers.http.schemas import (
    ROLLOUT_ID,
    InitResponse,
    NamedRollout,
    RolloutRequest,
    RolloutResponse,
    Schema,
    StatusResponse,
    ToolsResponse,
)

_EXAMPLE: Example = {
    "summary": "An arithmetic question, with this server's tools.",
    "value": {
        "rollout_id": "r-1",
        "server_url": "http://127.0.0.1:8081",
        "messages": [{"role": "user", "content": "What is 15 times 23?"}],
        "tokenizer_name": "policy",
        "sampling_params": {"temperature": 1.0, "max_tokens": 256},
    },
}
_Rollout = Annotated[RolloutRequest, Body(openapi_examples={"sum": _EXAMPLE})]


_REFUSED = documented(
    {
        401: "The bearer key is missing or wrong.",
        409: "The `rollout_id` was used by another request.",
        413: "The body is too large.",
        422: "The request violates the schema, or names an unlisted host; `param` is the path.",
        429: "The queue of rollouts is full; `Retry-After` says when to try again.",
        503: "The server is shutting down and accepts no new rollouts; `Retry-After` says when to try again.",
    }
)
_KEY: dict[int | str, Any] = {401: _REFUSED[401]}
_ID_REFUSED: dict[int | str, Any] = {status: _REFUSED[status] for status in (401, 413, 422)}
_ROLLOUT_ID = Path(description="As in the request; may contain slashes.", examples=["r-1"])


class Capacity(Schema):
    """The maximum number of rollouts at a time."""

    running: int
    waiting: int


class Health(Schema):
    """Whether rollouts are accepted."""

    status: Literal["healthy", "draining"]
    service: str = "rollout-server"
    in_flight: int = Field(description="Running rollouts.")
    waiting: int = Field(description="Queued rollouts.")
    capacity: Capacity
    lost_threads: int = Field(
        description="Renderings and calls of tools and environments that outlived their deadline and still run."
    )


def add_routes(router: APIRouter, state: AppState, runs: Runs) -> None:
    """All of them."""
    _add_rollouts(router, state, runs)
    _add_by_id(router, runs)
    _add_looks(router, state, runs)


def _add_rollouts(router: APIRouter, state: AppState, runs: Runs) -> None:
    def admit(request: RolloutRequest) -> None:
        for where in ("server_url", "tool_server_url"):
            if (url := getattr(request, where)) is not None:
                state.hosts.admit(url, where)
        limits = Limits(request.max_tokens_total, data_urls=True)
        admit_prompt([one.plain() for one in request.messages], None, limits)

    @router.post(
        "/rollout",
        tags=["rollouts"],
        summary="Run a rollout and wait for its answer",
        response_model=RolloutResponse,
        response_description="How the rollout ended.",
        responses=_REFUSED,
    )
    async def rollout(request: _Rollout) -> Response:
        """A repeat of the same request joins the rollout, or gets the first answer; nothing runs twice.

        A failed rollout is answered with 200 too: `status` is ERROR, and `error_message` says why.
        """
        admit(request)
        body = await asyncio.shield(runs.start(request, "sync").body)
        return Response(body, media_type="application/json")

    @router.post(
        "/v1/rollout/init",
        tags=["rollouts"],
        summary="Start a rollout and get the answer by callback",
        status_code=202,
        response_description="Accepted.",
        responses=_REFUSED,
    )
    async def init(request: _Rollout) -> InitResponse:
        """The answer, a `RolloutResponse`, goes to `{server_url}/v1/rollout/completed`: at least once, always the same.

        It is sent with `callback_api_key` as the bearer key, even if the rollout failed.
        """
        admit(request)
        return InitResponse(rollout_id=runs.start(request, "async").rollout_id, tools=state.tools.schemas())


def _add_by_id(router: APIRouter, runs: Runs) -> None:
    @router.post(
        "/rollout/cancel",
        tags=["rollouts"],
        summary="End a rollout",
        response_description="Its current state.",
        responses=_ID_REFUSED,
    )
    async def cancel(request: NamedRollout) -> StatusResponse:
        """Its answer is then an error; a rollout that has already been answered keeps its answer."""
        return StatusResponse(rollout_id=request.rollout_id, status=runs.cancel(request.rollout_id))

    @router.post(
        "/rollout/forget",
        tags=["rollouts"],
        summary="Forget a rollout's answer",
        response_description="Its current state.",
        responses=_ID_REFUSED,
    )
    async def forget(request: NamedRollout) -> StatusResponse:
        """A repeat of its request then runs it again, for a trainer that lost turns of it. A running one goes on."""
        return StatusResponse(rollout_id=request.rollout_id, status=runs.forget(request.rollout_id))

    @router.get(
        f"/rollout/{ROLLOUT_ID}/status",
        tags=["rollouts"],
        summary="State of a rollout",
        response_description="Its current state.",
        responses=_ID_REFUSED,
    )
    async def status(rollout_id: Annotated[str, _ROLLOUT_ID]) -> StatusResponse:
        """`unknown`: it never started, or its answer is no longer kept."""
        return StatusResponse(rollout_id=rollout_id, status=runs.shown(rollout_id))


def _add_looks(router: APIRouter, state: AppState, runs: Runs) -> None:
    @router.get(
        "/health",
        tags=["server"],
        summary="Whether the server accepts rollouts, and how many it has",
        response_description="The state of this process.",
    )
    async def health() -> Health:
        """Needs no key, even if one is set."""
        line = state.line
        return Health(
            status="draining" if runs.is_draining else "healthy",
            in_flight=line.running,
            waiting=line.waiting,
            capacity=Capacity(running=line.max_running, waiting=line.max_waiting),
            lost_threads=lost_threads(),
        )

    @router.get(
        "/tools",
        tags=["server"],
        summary="The tools of every rollout",
        response_description="All of them.",
        responses=_KEY,
    )
    async def tools() -> ToolsResponse:
        """OpenAI function schemas. Tools of a request's own `tool_server_url` aren't included."""
        return ToolsResponse(tools=state.tools.schemas())

    @router.get(
        "/metrics",
        tags=["server"],
        summary="Numbers for Prometheus",
        response_class=PlainTextResponse,
        response_description="The numbers.",
        responses=_KEY,
    )
    async def metrics() -> Response:
        """In Prometheus' text format."""
        return Response(state.counters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
