"""`sluice dlq` beside a run and after its end: what is replayed is decoded and trained, once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from sluice.pipeline.broker import connection
from sluice.pipeline.queue import JobQueue
from sluice.pipeline.wire.keys import ARQ_JOB
from tests.e2e.fixtures import MakeStack, detection_rows
from tests.e2e.stack import Stack


def kill_jobs(stack: Stack, count: int) -> list[str]:
    """Claim ready jobs as a worker would, and bury them; their sequence ids."""

    async def kill() -> list[str]:
        client = connection.connect(stack.broker_config)
        try:
            queue = JobQueue(client, stack.keys, worker="gravedigger")
            claims = (await queue.claim(count, 30, 3)).claims
            for claim in claims:
                await queue.fail(claim, claim.reason or "invalid_request", "the test wants it dead")
            return [f"{claim.job_id}:0" for claim in claims]
        finally:
            await client.aclose()

    return asyncio.run(kill())


def dlq(stack: Stack, *arguments: str, code: int = 0) -> str:
    """`sluice dlq ARGUMENTS…`; what it said."""
    verb, *rest = arguments
    command = stack.sluice("dlq", verb, "-c", str(stack.config_file), *rest)
    command.expendable = code != 0
    assert command.wait() == code, command.tail()
    return command.text()


def status(stack: Stack) -> dict[str, Any]:
    looked = stack.start("status", "--json")
    assert looked.wait() == 0, looked.tail()
    return json.loads(looked.text())


def test_replayed_letters_are_trained_beside_the_run_and_after_its_end(make_stack: MakeStack) -> None:
    stack = make_stack(detection_rows(24))
    assert stack.start("produce").wait() == 0
    first, second, third = kill_jobs(stack, 3)
    listed = json.loads(dlq(stack, "list", "--json"))
    assert (listed["schema_version"], listed["total"], listed["by_reason"]) == (1, 3, {"invalid_request": 3})
    assert [row["seq_id"] for row in listed["rows"]] == [third, second, first]
    assert f"{first} " in dlq(stack, "list")
    shown = json.loads(dlq(stack, "show", first, "--json"))
    assert (shown["detail"], shown["worker"]) == ("the test wants it dead", "gravedigger")
    assert shown["job"]["messages"][0]["content"].startswith("find ")
    assert "did you mean 'invalid_request'?" in dlq(stack, "replay", "--reason", "invalid_requests", code=1)
    for role in ("consume", "train"):
        stack.start(role)
    stack.wait(lambda now: now.alive("trainer") and now.alive("consumer"), "the run to go on")
    assert f"{first.removesuffix(':0')}~r1" in dlq(stack, "replay", first)
    stack.start("worker")
    end = stack.finish()
    assert (end.enqueued, end.trained, end.dead, end.dead_letters) == (25, 22, 3, 2)
    assert f"{first.removesuffix(':0')}~r1:0" in stack.trained()
    assert '"replayed":2' in dlq(stack, "replay", "--all", "--json")
    assert not stack.snapshot().complete
    again = stack.start("run")
    assert again.wait() == 0, again.tail()
    now, trained = stack.snapshot(), stack.trained()
    assert (now.complete, now.enqueued, now.trained, now.dead_letters) == (True, 27, 24, 0)
    assert len(trained) == len(set(trained)) == 24
    alive = stack.expected() - {first, second, third}
    assert alive < set(trained)
    assert {name.partition("~r")[0] for name in set(trained) - alive} == {
        seq_id.removesuffix(":0") for seq_id in (first, second, third)
    }
    stack.assert_streams_empty()
    assert now.credit.bytes == 0, "everything that was held is credit again"


def test_letters_are_shown_and_dropped(make_stack: MakeStack) -> None:
    stack = make_stack([])
    job_id = f"{stack.run}:junk"
    with stack.client() as client:
        raw: Any = client
        raw.set(ARQ_JOB + job_id, b"\x80\x04junk")
        raw.zadd(stack.keys.jobs, {job_id: 1})
    assert kill_jobs(stack, 1) == [f"{job_id}:0"]
    shown = dlq(stack, "show", f"{job_id}:0")
    assert "malformed_envelope" in shown
    assert "80 04 6a 75 6e 6b" in shown
    assert "no dead letter has the id 'x:0'" in " ".join(dlq(stack, "show", "x:0", code=1).split())
    assert status(stack)["dead_letters"] == 1
    assert "--yes" in dlq(stack, "drop", "--all", code=1)
    assert "select dead letters" in dlq(stack, "drop", "--yes", code=2)
    assert "dropped: 1 sequence of 1 job" in dlq(stack, "drop", f"{job_id}:0", "--yes")
    assert "there are no dead letters" in dlq(stack, "drop", "--all", "--yes", code=1)
    assert "no dead letters" in dlq(stack, "list")
    left = status(stack)
    assert (left["dead"], left["dead_letters"]) == (1, 0)
    assert [left["credit"]["bytes"]] == [sum(map(len, stack_results(stack)))]


def stack_results(stack: Stack) -> list[bytes]:
    """What waits for a consumer."""
    with stack.client() as client:
        raw: Any = client
        return [fields[b"d"] for _, fields in raw.xrange(f"{stack.keys.results}0")]
