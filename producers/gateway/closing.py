"""The end of a rollout: its trajectories are published once, or it is dropped, once.

- COMPLETED publishes; ERROR and CANCELLED drop it, and so does a rollout without a turn.
- Every repeat is answered with `already`, whoever was first.
"""

from __future__ import annotations

from typing import Any

from pipeline.queue.rollouts import Rollouts
from producers.gateway.metrics import Metrics
from producers.gateway.refusals import Refusal, unknown
from producers.gateway.trajectory import Verdict, trajectories

_MOST_TRIES = 20
_DROPPED = {"ERROR": "rollout_error", "CANCELLED": "cancelled"}


class Closing:
    """Ends rollouts."""

    def __init__(self, rollouts: Rollouts, metrics: Metrics) -> None:
        self._rollouts, self._metrics = rollouts, metrics

    async def finish(self, rollout_id: str, verdict: Verdict) -> dict[str, Any]:
        """What happened, as it is answered. Raises Refusal (404) for an unknown rollout."""
        for _ in range(_MOST_TRIES):
            rollout = await self._rollouts.load(rollout_id)
            if rollout is None:
                raise unknown(rollout_id)
            turns = len(rollout.turns)
            said: dict[str, Any] = {"rollout_id": rollout_id}
            if rollout.state == "closed":
                return {**said, "already": True}
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
        raise Refusal(503, f"rollout {rollout_id} got new turns all the time; finish it when its last call has ended")
