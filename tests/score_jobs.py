"""Score jobs for tests, and scorers that make their numbers up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.pipeline.queue.scores import ScoreJobs, TakenJob
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import ScoreJob, ScoreResult, encode
from sluice.pipeline.wire.tokens import FloatArray, TokenArray
from tests.roles import eventually

LONG_S = 60.0


def job(seq_id: str, version: int = 1, **changes: Any) -> ScoreJob:
    fields: dict[str, Any] = {
        "run": "r",
        "seq_id": seq_id,
        "prompt_token_ids": TokenArray([1, 2]),
        "token_ids": TokenArray([3, 4, 5]),
        "positions": TokenArray([0, 2]),
        "version": version,
    }
    return ScoreJob(**{**fields, **changes})


def scored(taken: TakenJob, value: float = -1.0) -> tuple[TakenJob, ScoreResult]:
    one = taken.job
    logprobs = FloatArray([value] * len(one.positions))
    return taken, ScoreResult(seq_id=one.seq_id, scored_version=one.version, positions=one.positions, logprobs=logprobs)


def scorer(client: Any, keys: Keys, name: str = "s", lease_s: float = LONG_S) -> ScoreJobs:
    return ScoreJobs(client, keys, name, lease_s)


async def serve(jobs: ScoreJobs, count: int, value: float = -1.0) -> list[str]:
    """Answer until `count` jobs were seen."""
    seen: list[str] = []
    while len(seen) < count:
        taken = await jobs.take(8, 200)
        await jobs.answer([scored(one, value) for one in taken])
        seen += [one.job.seq_id for one in taken]
    return seen


async def put(client: Any, keys: Keys, *jobs: ScoreJob) -> None:
    for one in jobs:
        await client.xadd(keys.score_jobs, {"s": encode(one)})


def names(taken: Sequence[TakenJob]) -> list[str]:
    return [one.job.seq_id for one in taken]


async def nothing_is_left(client: Any, keys: Keys, nonce: str = "t") -> None:
    assert await client.xlen(keys.score_jobs) == 0
    assert await client.exists(keys.score_answers + nonce) == 0
    groups = await client.xinfo_groups(keys.score_jobs) if await client.exists(keys.score_jobs) else []
    assert [group["pending"] for group in groups] in ([], [0])


async def all_of(jobs: ScoreJobs, count: int) -> list[TakenJob]:
    """Exactly `count` jobs."""
    found: list[TakenJob] = []

    async def holds() -> bool:
        found.extend(await jobs.take(count - len(found), 100))
        return len(found) >= count

    await eventually(holds, f"{count} score jobs")
    return found
