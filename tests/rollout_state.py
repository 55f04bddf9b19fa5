"""Agent rollouts for tests, and what the broker says of them."""

from __future__ import annotations

from typing import Any

from sluice.pipeline.queue.rollouts import RolloutHead, Turn
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import sequence_result
from tests.tiny_tokenizer import tiny_codec


def head(rollout_id: str = "r1", **changes: Any) -> RolloutHead:
    fields: dict[str, Any] = {"rollout_id": rollout_id, "group_id": rollout_id, "task": "exact_answer"}
    return RolloutHead(**{**fields, **changes})


def turn(key: str = "k0", parent: int = -1) -> Turn:
    result = sequence_result("decode-job", prompt_token_ids=TokenArray(), turn=0)
    return Turn(
        key=key, parent=parent, history="h", added_token_ids=TokenArray([1, 2]), result=result,
        message={"role": "assistant", "content": "é"},
    )  # fmt: skip


def trajectory(one: RolloutHead, part: int = 0, parts: int = 1) -> SequenceResult:
    """Two turns with a tool's token and its terminator between them: 1 0 1 1 1 1."""
    ids = [*tiny_codec("bytes").encode("x"), 2, *tiny_codec("bytes").encode("seven")]
    mask = [1, 0] + [1] * (len(ids) - 2)
    return SequenceResult(
        seq_id=one.rollout_id + (f"/{part}" if part else ""), rollout_id=one.rollout_id, turn=2,
        group_id=one.group_id, group_size=one.group_size, index=one.index, part=part, parts=parts,
        prompt_token_ids=TokenArray([5, 6]), token_ids=TokenArray(ids), response_mask=Runs.of(mask),
        logprobs=FloatArray([-0.5 * on for on in mask]), versions=Runs.of(on - 1 for on in mask),
        finish_reason="stop", truth="seven", task="exact_answer",
    )  # fmt: skip


async def counts(client: Any, keys: Keys) -> dict[str, int]:
    """Without those that are 0."""
    found = await client.hgetall(keys.counts)
    return {name.decode(): int(value) for name, value in found.items() if b"last:" not in name and int(value)}


async def entries(client: Any, keys: Keys) -> list[dict[str, bytes]]:
    return [
        {name.decode(): value for name, value in fields.items()}
        for _, fields in await client.xrange(keys.results + "0")
    ]


async def held(client: Any, keys: Keys) -> int:
    """Bytes of results that lie in the stream."""
    return sum(len(row.get("r") or row["d"]) for row in await entries(client, keys))
