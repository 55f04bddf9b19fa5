"""How a caller opens and ends a rollout, and what becomes of it."""

from __future__ import annotations

import math
import secrets
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from sluice.pipeline.config.rules import MAX_REWARD_PARTS, REWARD_NAME
from sluice.pipeline.config.types import Config
from sluice.pipeline.errors import MessageError
from sluice.pipeline.queue.rollouts import Rollouts
from sluice.pipeline.wire.messages import MAX_GROUP, RolloutHead
from sluice.producers.gateway.apis.fields import ListedSchema
from sluice.producers.gateway.apis.openapi import errors
from sluice.producers.gateway.apis.requests import check_can_travel
from sluice.producers.gateway.chat import alone_in_group, refuse_trained
from sluice.producers.gateway.metrics import Metrics
from sluice.producers.gateway.refusals import Refusal, closed, turns_lost, unknown
from sluice.producers.gateway.service import Service
from sluice.producers.gateway.turns import Verdict, trajectories
from sluice.producers.http.schemas import (
    MAX_ID_LENGTH,
    MAX_METADATA_BYTES,
    NUM_TURNS,
    ROLLOUT_ID,
    JsonObject,
    RolloutResponse,
)
from sluice.producers.http.strict_json import StrictRoute

RewardName = Annotated[str, StringConstraints(pattern=rf"^{REWARD_NAME}$")]


class FinishRequest(ListedSchema):
    """`POST /v1/rollout/{rollout_id}/finish`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"final_status": "COMPLETED", "reward": 1.0},
                {"final_status": "COMPLETED", "rewards": {"right": 1.0, "short": 0.25}},
            ]
        }
    )

    final_status: Literal["COMPLETED", "ERROR", "CANCELLED"] = Field(description="Only COMPLETED rollouts are trained.")
    reward: float | None = Field(
        default=None, description="Of the whole rollout; null: the sum of `rewards`, or without them the task decides."
    )
    rewards: dict[RewardName, float] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_REWARD_PARTS,
        description="Its parts by name, kept in the metadata of the sequence.",
    )
    truth: Any = Field(default=None, description="For the task; null: the truth the rollout was opened with.")
    num_turns: int | None = Field(default=None, ge=0, description=NUM_TURNS)

    @field_validator("truth")
    @classmethod
    def _can_travel(cls, value: Any) -> Any:
        check_can_travel(value)
        return value

    @property
    def total(self) -> float | None:
        """The reward, from its parts if only they were sent. Raises Refusal (400) if the sum isn't finite."""
        if self.reward is not None or self.rewards is None:
            return self.reward
        if not math.isfinite(total := sum(self.rewards.values())):
            raise Refusal(400, "rewards: their sum is not finite; send smaller ones", "rewards")
        return total


class OpenRequest(ListedSchema):
    """`POST /v1/rollouts`. A group is complete once all its members have ended."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"rollout_id": "sums-1:0", "group_id": "sums-1", "group_size": 8, "index": 0, "truth": "1714"}]
        }
    )

    rollout_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_ID_LENGTH, description="Null: a new one is made."
    )
    group_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_ID_LENGTH, description="Of the rollouts that are compared."
    )
    group_size: int = Field(default=1, ge=1, le=MAX_GROUP, description="Rollouts in the group.")
    index: int = Field(default=0, ge=0, lt=MAX_GROUP, description="Its place in the group, from 0.")
    task: str | None = Field(default=None, description="The run's `rollout_matching.task`, or null.")
    truth: Any = Field(default=None, description="For the task.")
    metadata: JsonObject = Field(default={}, description="Kept with the sequence; at most 1 MiB as JSON.")

    @field_validator("truth", "metadata")
    @classmethod
    def _can_travel(cls, value: Any) -> Any:
        check_can_travel(value)
        return value

    @field_validator("metadata")
    @classmethod
    def _small(cls, value: JsonObject) -> JsonObject:
        if (size := len(msgspec.json.encode(value))) > MAX_METADATA_BYTES:
            raise ValueError(f"has {size} bytes as JSON; at most {MAX_METADATA_BYTES}")
        return value

    def head(self, rollout_id: str, config: Config) -> RolloutHead:
        """Raises Refusal (400) for a group or task that the run can't train."""
        self.check_fields()
        task = config.rollout_matching.task
        if self.task not in (None, task):
            raise Refusal(400, f"task: this run's is {task} (rollout_matching.task); send that, or remove it", "task")
        if self.group_id is None and self.group_size > 1:
            raise Refusal(400, f"group_size is {self.group_size}, but there is no group_id; send one", "group_id")
        if self.group_size == 1 and (problem := alone_in_group(config.policy)):
            raise Refusal(400, f"group_size: {problem}", "group_size")
        keep = config.rollout_matching.reward is not None
        try:
            return RolloutHead(
                rollout_id=rollout_id,
                group_id=self.group_id or rollout_id,
                group_size=self.group_size,
                index=self.index,
                task=task,
                truth=self.truth,
                metadata=self.metadata,
                keep_messages=keep,
            )
        except MessageError as error:
            path = "rollout_id" if str(error).startswith("rollout_id") else "index"
            raise Refusal(400, str(error), path) from error


_MOST_TRIES = 20
_DROPPED = {"ERROR": "rollout_error", "CANCELLED": "cancelled"}


class Closing:
    """Ends rollouts: their trajectories are published once, or they are dropped, once.

    - COMPLETED publishes; ERROR and CANCELLED drop. A rollout without turns is dropped too.
    - One with fewer turns than were answered isn't what the agent played: it is refused, and stays open.
    - Repeats are answered with `already`, whoever was first.
    """

    def __init__(self, rollouts: Rollouts, metrics: Metrics) -> None:
        self._rollouts, self._metrics = rollouts, metrics

    async def finish(self, rollout_id: str, verdict: Verdict) -> dict[str, Any]:
        """The answer: what happened. Raises Refusal: 404 for an unknown rollout, 409 for one that has lost turns."""
        for _ in range(_MOST_TRIES):
            rollout = await self._rollouts.load(rollout_id)
            if rollout is None:
                raise unknown(rollout_id)
            turns = len(rollout.turns)
            said: dict[str, Any] = {"rollout_id": rollout_id}
            if rollout.state == "closed":
                return {**said, "already": True}
            if verdict.final_status == "COMPLETED" and turns < (answered := verdict.num_turns or 0):
                raise turns_lost(rollout_id, turns, answered)
            reason = _DROPPED.get(verdict.final_status) or (None if turns else "no_turns")
            if reason is not None:
                word = await self._rollouts.drop(rollout_id, reason)
                said |= {"outcome": "dropped", "reason": reason}
            else:
                results = trajectories(rollout, verdict)
                word = await self._rollouts.publish(rollout_id, results, turns)
                said |= {"outcome": "published", "parts": len(results)}
            if word == "ok":
                self._metrics.rollouts.labels(said["outcome"]).inc()
                return {**said, "num_turns": turns, "already": False}
        raise Refusal(503, f"rollout {rollout_id} kept getting new turns; finish it after its last call has ended")


_ROLLOUT_ID = Path(description="As in the calls; may contain slashes.", examples=["r-1"])


class Finished(BaseModel):
    """What happened to the rollout."""

    rollout_id: str
    already: bool = Field(description="An earlier call, or the rollout's time to live, had already ended it.")
    outcome: str | None = Field(default=None, description="`published` or `dropped`.")
    reason: str | None = Field(default=None, description="Why it was dropped.")
    num_turns: int | None = Field(default=None, description="Number of calls in it.")
    parts: int | None = Field(default=None, description="Training sequences; more than one if it forked.")


class Opened(BaseModel):
    """The rollout is open."""

    rollout_id: str
    already: bool = Field(description="It was open before; its group and truth are those of then.")
    base_path: str = Field(description="For an agent that takes only a base URL: this path of this server.")


def rollout_routes(service: Service) -> APIRouter:
    """Routes of one process."""
    router = APIRouter(
        route_class=StrictRoute, tags=["rollouts"], responses=errors(400, 401, 404, 409, 413, 422, 500, 503)
    )
    closing = Closing(service.rollouts, service.metrics)
    said: dict[str, Any] = {"response_description": Finished.__doc__, "response_model_exclude_none": True}

    @router.post(f"/v1/rollout/{ROLLOUT_ID}/finish", summary="End a rollout", **said)
    async def finish(rollout_id: Annotated[str, _ROLLOUT_ID], body: FinishRequest) -> Finished:
        """COMPLETED publishes its tokens for training, once; ERROR and CANCELLED drop them. May be repeated."""
        body.check_fields()
        verdict = Verdict(
            final_status=body.final_status,
            reward=body.total,
            rewards=body.rewards,
            truth=body.truth,
            num_turns=body.num_turns,
        )
        return await _end(rollout_id, verdict)

    @router.post("/v1/rollout/completed", summary="A rollout server's callback", **said)
    async def completed(body: RolloutResponse) -> Finished:
        """The callback after `POST /v1/rollout/init` at a rollout server; ends the rollout as `finish` does."""
        verdict = Verdict(final_status=body.status.value, reward=body.reward, num_turns=body.num_turns)
        return await _end(body.rollout_id, verdict)

    @router.post(
        "/v1/rollouts",
        summary="Open a rollout",
        response_description=Opened.__doc__ or "",
    )
    async def opened(body: OpenRequest) -> Opened:
        """Names its group, its place in it, and the truth, before its first call. May be repeated.

        A rollout that isn't opened is a group of one, and opens with its first call.
        """
        rollout_id = secrets.token_hex(16) if body.rollout_id is None else body.rollout_id
        await refuse_trained(service.config, rollout_id)
        [outcome] = await service.rollouts.open([body.head(rollout_id, service.config)])
        if outcome == "done":
            raise closed(rollout_id)
        service.metrics.rollouts.labels("opened").inc(outcome == "enqueued")
        path = f"/rollouts/{quote(rollout_id, safe='')}/v1"
        return Opened(rollout_id=rollout_id, already=outcome == "duplicate", base_path=path)

    async def _end(rollout_id: str, verdict: Verdict) -> Finished:
        return Finished(**await closing.finish(rollout_id, verdict))

    return router
