"""How a caller ends a rollout."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from producers.gateway.requests import FinishRequest
from producers.gateway.routes_chat import ERRORS
from producers.gateway.service import Service
from producers.gateway.trajectory import Verdict
from producers.rollout.schemas.rollout import RolloutResponse


class Finished(BaseModel):
    """What became of the rollout; `already` where an earlier call, or its time to live, had ended it."""

    rollout_id: str
    already: bool
    outcome: str | None = None
    reason: str | None = None
    num_turns: int | None = None
    parts: int | None = None


def rollout_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(tags=["rollouts"], responses=ERRORS)

    @router.post("/v1/rollout/{rollout_id:path}/finish", summary="End a rollout", response_model_exclude_none=True)
    async def finish(rollout_id: str, body: FinishRequest) -> Finished:
        """COMPLETED publishes its tokens for training; ERROR and CANCELLED drop them. May be repeated."""
        verdict = Verdict(final_status=body.final_status, reward=body.reward, truth=body.truth)
        return await _end(rollout_id, verdict)

    @router.post("/v1/rollout/completed", summary="A rollout server's callback", response_model_exclude_none=True)
    async def completed(body: RolloutResponse) -> Finished:
        """The asynchronous protocol's answer; ends the rollout like `finish`, once."""
        return await _end(body.rollout_id, Verdict(final_status=body.status.value))

    async def _end(rollout_id: str, verdict: Verdict) -> Finished:
        said: dict[str, Any] = await service.closing.finish(rollout_id, verdict)
        return Finished(**said)

    return router
