"""Rollout helpers that every task uses: last turn, counters, and per-token arrays of the kept tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from sluice.consumers.tasks.segments import Segment
from sluice.consumers.tasks.task import TaskContext, TextCodec
from sluice.pipeline.wire.messages import GeometryTarget, SequenceResult, TrainingSample
from sluice.pipeline.wire.sampled_tokens import SampledTokens
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray


@dataclass(frozen=True)
class Response:
    """The target after the prompt; arrays have shape (len(token_ids),), the first `kept` tokens are sampled.

    `geometry` positions count from the start of the response.
    """

    token_ids: list[int]
    labels: list[int]
    weights: list[float]
    segments: list[int]
    kept: int
    geometry: list[GeometryTarget] = field(default_factory=list)


def last_turn(result: SequenceResult) -> tuple[int, int]:
    """First token and end of the last turn that the policy sampled; excludes an end forced by a guard."""
    at, turn = 0, (0, 0)
    for value, count in result.response_mask.runs or ((1, len(result.token_ids)),):
        if value == 1:
            turn = (turn[0] if turn[1] == at else at, at + count)
        at += count
    return turn


def answer_ids(result: SequenceResult, codec: TextCodec) -> list[int]:
    """The sampled ids of the last turn, before its terminator."""
    stops = set(codec.eos_token_ids)
    start, end = last_turn(result)
    ids = list(result.token_ids[start:end])
    return ids[: next((at for at, token in enumerate(ids) if token in stops), len(ids))]


def rollout_metrics(result: SequenceResult) -> dict[str, float]:
    """Task-independent counters of one sequence."""
    guard = result.triggers
    triggered = bool(guard.get("repeat_terminate"))
    saved = max(0, result.sampling.max_new_tokens - int(guard.get("at_token", 0))) if triggered else 0
    between = result.sampled.mask[: last_turn(result)[0]].count(0)
    metrics = {
        "rollout/samples": 1.0,
        "rollout/num_turns": 1.0 if result.turn is None else float(result.turn),
        "rollout/tool_tokens": float(between),
        "rollout/reshaped_tokens": float(sum(one.end - one.start for one in result.reshaped)),
        "rollout/gen_new_tokens": float(len(result.token_ids) - between),
        "rollout/prompt_len": float(len(result.prompt_token_ids)),
        "rollout/rollout_len": float(len(result.token_ids)),
        "rollout/repeat_terminate_active": float(bool(guard.get("active"))),
        "rollout/repeat_terminate_triggered_sequences": float(triggered),
        "rollout/repeat_terminate_tokens_saved": float(saved),
        "rollout/backend_hf": float(result.backend == "hf"),
        "rollout/backend_vllm": float(result.backend == "vllm"),
    }
    decode_s = result.timings.get("decode_s")
    return metrics if decode_s is None else metrics | {"rollout/decode_s": decode_s}


def final_turn(result: SequenceResult) -> SequenceResult:
    """The last turn alone; everything before it becomes its prompt."""
    start, _ = last_turn(result)
    if start == 0:
        return result
    prompt = TokenArray([*result.prompt_token_ids, *result.token_ids[:start]])
    return replace(result, prompt_token_ids=prompt, **result.sampled[start:].columns())


def rewarded(sample: TrainingSample, reward: float | None) -> TrainingSample:
    """The sample with the reward that the agent's side gave its rollout, if any."""
    return sample if reward is None else replace(sample, reward=reward, metrics=sample.metrics | _rewards(reward))


def training_sample(
    result: SequenceResult, response: Response, metrics: dict[str, float], reward: float | None = None
) -> TrainingSample:
    """Prompt (weight 0) + response, with the behaviour and proximal arrays of the kept sampled tokens."""
    prompt = list(result.prompt_token_ids)
    start, kept = len(prompt), result.sampled[: response.kept]
    weights = [w if at >= len(kept) or kept.mask[at] else 0.0 for at, w in enumerate(response.weights)]
    whole = SampledTokens.context(prompt) + kept + SampledTokens.context(response.token_ids[response.kept :])
    return TrainingSample(
        seq_id=result.seq_id,
        group_id=result.group_id,
        task=result.task,
        labels=TokenArray(prompt + response.labels),
        weights=FloatArray([0.0] * start + weights),
        segments=Runs.of([Segment.prompt] * start + response.segments),
        prompt_len=start,
        geometry=[_shifted(target, start) for target in response.geometry],
        **whole.with_mask().columns(),
        temperature=temperature_of(result),
        keeps_cache=result.keeps_cache,
        reward=reward,
        enqueued_at=result.timings.get("enqueued_at", 0.0),
        trace=result.trace,
        metrics=metrics | _lengths(start, response) | _rewards(reward),
    )


def sampled_response(result: SequenceResult, right: bool, ctx: TaskContext) -> Response:
    """Every token of the result, for a policy loss; tokens that weren't sampled keep mask 0 and get weight 0.

    Those of right answers have the cross-entropy weight `policy.ce_weight`.
    """
    ids = list(result.token_ids)
    return Response(
        token_ids=ids,
        labels=ids,
        weights=[ctx.policy.ce_weight if right else 0.0] * len(ids),
        segments=segments_of(result, right, ctx.codec),
        kept=len(ids),
    )


def segments_of(result: SequenceResult, right: bool, codec: TextCodec) -> list[int]:
    """The segment of each token of the result; text between two turns is a prompt."""
    stops, code = set(codec.eos_token_ids), Segment.matched_desc if right else Segment.false_positive
    on = [*result.sampled.mask[: last_turn(result)[1]], *[1] * len(result.token_ids)]
    return [
        int(Segment.prompt if not on[at] else Segment.closing if token in stops else code)
        for at, token in enumerate(result.token_ids)
    ]


def temperature_of(result: SequenceResult) -> float:
    """The temperature of its logprobs; greedy tokens are scored at temperature 1."""
    return 1.0 if result.logprobs_mode == "raw_logprobs" else result.sampling.temperature or 1.0


def _shifted(target: GeometryTarget, by: int) -> GeometryTarget:
    x1, y1, x2, y2 = target.positions
    return GeometryTarget(positions=(x1 + by, y1 + by, x2 + by, y2 + by), box=target.box)


def _lengths(prompt_len: int, response: Response) -> dict[str, float]:
    return {
        "rollout/train_len": float(prompt_len + len(response.token_ids)),
        "rollout/append_len": float(len(response.token_ids) - response.kept),
    }


def _rewards(reward: float | None) -> dict[str, float]:
    return {} if reward is None else {"rollout/rewards": reward, "rollout/rewarded_samples": 1.0}
