"""How a caller ends a rollout."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from producers.gateway.openapi import errors
from producers.gateway.requests import FinishRequest
from producers.gateway.service import Service
from producers.gateway.trajectory import Verdict
from producers.http.paths import ROLLOUT_ID
from producers.http.strict_json import StrictRoute
from producers.rollout.schemas.rollout import RolloutResponse

_ROLLOUT_ID = Path(description="That of the calls; it may have slashes.", examples=["r-1"])


class Finished(BaseModel):
    """What became of the rollout."""

    rollout_id: str
    already: bool = Field(description="An earlier call, or the rollout's time to live, had ended it.")
    outcome: str | None = Field(default=None, description="`published` or `dropped`.")
    reason: str | None = Field(default=None, description="Why it was dropped.")
    num_turns: int | None = Field(default=None, description="Calls whose tokens it holds.")
    parts: int | None = Field(default=None, description="Training sequences; more than one where it forked.")


def rollout_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(route_class=StrictRoute, tags=["rollouts"], responses=errors(400, 401, 404, 413, 422, 500, 503))
    said: dict[str, Any] = {"response_description": Finished.__doc__, "response_model_exclude_none": True}

    @router.post(f"/v1/rollout/{ROLLOUT_ID}/finish", summary="End a rollout", **said)
    async def finish(rollout_id: Annotated[str, _ROLLOUT_ID], body: FinishRequest) -> Finished:
        """COMPLETED publishes its tokens for training, once; ERROR and CANCELLED drop them. May be repeated."""
        verdict = Verdict(final_status=body.final_status, reward=body.reward, truth=body.truth)
        return await _end(rollout_id, verdict)

    @router.post("/v1/rollout/completed", summary="A rollout server's callback", **said)
    async def completed(body: RolloutResponse) -> Finished:
        """What `POST /v1/rollout/init` of a rollout server leads to; it ends the rollout as `finish` does."""
        return await _end(body.rollout_id, Verdict(final_status=body.status.value))

    async def _end(rollout_id: str, verdict: Verdict) -> Finished:
        return Finished(**await service.closing.finish(rollout_id, verdict))

    return router
