"""A rollout's turns as training sequences: one for each leaf of the tree of turns.

    root prompt │ sampled │ added │ sampled │ added │ sampled      one path
    not in the   mask 1     mask 0  mask 1    mask 0  mask 1       token_ids, logprobs, versions, …
    arrays

- The first part is the branch with the newest turn, which shows how the rollout ended: a task finds its reward there,
  not in a branch the agent gave up.
- Nothing is trained twice: turns already in an earlier part are context in later ones, mask 0.
- Where the mask is 0 the log-probability is 0.0 and the versions are -1; a turn keeps its mask (for the end of
  sequence that the repeat guard forced).
- Its images are those of the last turn, which saw all images of the path; their expansions are context, mask 0.
- The ending is the last turn's, unless a turn was cut short (deadline, cancelled, error): then it is that one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from sluice.pipeline.queue.rollouts import Rollout, RolloutHead, Rollouts, Turn
from sluice.pipeline.wire.messages import CUT_SHORT, NO_LOGPROBS, FinishReason, Reshaped, SequenceResult
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.pipeline.wire.tokens import TokenArray
from sluice.producers.gateway.metrics import Metrics
from sluice.producers.gateway.refusals import Refusal, unknown


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's verdict on a whole rollout."""

    final_status: str = "COMPLETED"
    reward: float | None = None
    rewards: dict[str, float] | None = None  # its parts by name
    truth: Any = None  # None: the head's


def path_to(turns: Sequence[Turn], place: int) -> list[Turn]:
    """The turns from a root to this one."""
    return [turns[at] for at in _places(turns, place)]


def known_token_ids(path: Sequence[Turn]) -> list[int]:
    """Every token of a path, the root's prompt included."""
    return [token for turn in path for part in (turn.added_token_ids, turn.result.token_ids) for token in part]


def sent_token_ids(path: Sequence[Turn]) -> list[int]:
    """The same as sent to workers: each image is one placeholder."""
    return [token for turn in path for part in (_sent(turn), turn.result.token_ids) for token in part]


def _sent(turn: Turn) -> TokenArray:
    return turn.sent_token_ids if len(turn.sent_token_ids) else turn.added_token_ids


def trajectories(rollout: Rollout, verdict: Verdict) -> list[SequenceResult]:
    """One result for each leaf, the newest one first; at least one turn is needed."""
    turns = rollout.turns
    parents = {turn.parent for turn in turns}
    leaves = [place for place in reversed(range(len(turns))) if place not in parents]
    seen: set[int] = set()
    results: list[SequenceResult] = []
    for part, leaf in enumerate(leaves):
        path = _places(turns, leaf)
        tokens = _sampled([turns[place] for place in path], [place not in seen for place in path])
        seen.update(path)
        about = _about(rollout.head, [turns[place].result for place in path], verdict, len(turns), len(leaves))
        results.append(
            SequenceResult(
                **about,
                seq_id=f"{rollout.head.rollout_id}/{part}" if part else rollout.head.rollout_id,
                part=part,
                prompt_token_ids=TokenArray(turns[path[0]].added_token_ids),
                reshaped=_reshaped([turns[place] for place in path]),
                **tokens.columns(),
            )
        )
    return results


def _places(turns: Sequence[Turn], place: int) -> list[int]:
    places: list[int] = []
    while place >= 0:
        places.append(place)
        place = turns[place].parent
    return places[::-1]


def _sampled(path: Sequence[Turn], is_new: Sequence[bool]) -> SampledTokens:
    """Everything after the root's prompt; turns that are not new were sampled in an earlier part."""
    whole = SampledTokens()
    for depth, (turn, new) in enumerate(zip(path, is_new, strict=True)):
        if depth:
            whole += SampledTokens.context(turn.added_token_ids)
        whole += turn.result.sampled if new else SampledTokens.context(turn.result.token_ids)
    return whole.with_mask()


def _reshaped(path: Sequence[Turn]) -> list[Reshaped]:
    """Those of the turns, from the end of the root's prompt on."""
    found: list[Reshaped] = []
    at = -len(path[0].added_token_ids)
    for turn in path:
        at += len(turn.added_token_ids)
        found += [replace(one, start=one.start + at, end=one.end + at) for one in turn.result.reshaped]
        at += len(turn.result.token_ids)
    return found


def _about(
    head: RolloutHead, results: Sequence[SequenceResult], verdict: Verdict, num_turns: int, parts: int
) -> dict[str, Any]:
    """All fields of a trajectory that aren't arrays."""
    last = results[-1]
    return {
        "rollout_id": head.rollout_id,
        "group_id": head.group_id,
        "group_size": head.group_size,
        "index": head.index,
        "parts": parts,
        "turn": len(results),
        "reward": verdict.reward,
        "worker": last.worker,
        "backend": last.backend,
        "engine_version": last.engine_version,
        "text": last.text,
        "raw_text": last.raw_text,
        "finish_reason": _ending(results),
        "stop_reason": last.stop_reason,
        "triggers": last.triggers,
        "images": last.images,
        "logprobs_mode": last.logprobs_mode if all(one.has_logprobs for one in results) else NO_LOGPROBS,
        "keeps_cache": any(one.keeps_cache for one in results),
        "sampling": last.sampling,
        "timings": {
            "enqueued_at": head.opened_at,
            "queue_s": round(sum(one.timings.get("queue_s", 0.0) for one in results), 4),
            "decode_s": round(sum(one.timings.get("decode_s", 0.0) for one in results), 4),
            "finished_at": max(one.timings.get("finished_at", 0.0) for one in results),
        },
        "trace": head.trace or results[0].trace,
        "truth": head.truth if verdict.truth is None else verdict.truth,
        "task": head.task,
        "metadata": {
            **head.metadata,
            "num_turns": num_turns,
            "final_status": verdict.final_status,
            "parts": parts,
            **({} if verdict.rewards is None else {"rewards": verdict.rewards}),
        },
        "messages": head.request.get("messages", []) if head.keep_messages else [],
    }


def _ending(results: Sequence[SequenceResult]) -> FinishReason:
    last = results[-1].finish_reason
    cut: list[FinishReason] = [one.finish_reason for one in results if one.finish_reason in CUT_SHORT]
    return cut[-1] if cut and last != "repeat_terminated" else last  # its flag must match the ending


_MOST_TRIES = 20
_DROPPED = {"ERROR": "rollout_error", "CANCELLED": "cancelled"}


class Closing:
    """Ends rollouts: their trajectories are published once, or they are dropped, once.

    - COMPLETED publishes; ERROR and CANCELLED drop. A rollout without turns is dropped too.
    - Repeats are answered with `already`, whoever was first.
    """

    def __init__(self, rollouts: Rollouts, metrics: Metrics) -> None:
        self._rollouts, self._metrics = rollouts, metrics

    async def finish(self, rollout_id: str, verdict: Verdict) -> dict[str, Any]:
        """The answer: what happened. Raises Refusal (404) for an unknown rollout."""
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
        raise Refusal(503, f"rollout {rollout_id} kept getting new turns; finish it after its last call has ended")
