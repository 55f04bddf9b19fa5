"""Looks at a run as `sluice status --why` does, and roles to look at."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sluice.consumers.loop import Consumer
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, RoleKey
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, DataConfig, RolloutMatchingConfig
from sluice.pipeline.status.descriptions import stall_text
from sluice.pipeline.status.inspection import Why, look_twice
from sluice.pipeline.status.report import why_text
from sluice.pipeline.status.snapshot import Stall, StallKind
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import encode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.deadlines import HANG_S
from tests.factories import sequence_result
from tests.roles import eventually, role_of, run_config
from tests.tiny_tokenizer import tiny_codec

CONTEXT = TaskContext(tiny_codec("bytes"), RolloutMatchingConfig(task="exact_answer"))
TASK = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)


async def why(config: Config, apart_s: float = 0.2) -> Why:
    """Two looks."""
    return await asyncio.to_thread(look_twice, config, apart_s)


async def stalled(config: Config, kind: StallKind) -> tuple[Why, Stall]:
    """The look in which a stall of this kind is there, and that stall; it says what to do."""
    found: list[tuple[Why, Stall]] = []

    async def is_there() -> bool:
        look = await why(config, 0.05)
        found.extend((look, stall) for stall in look.now.stalls if stall.kind == kind)
        return bool(found)

    await eventually(is_there, f"a stall of the kind {kind}")
    look, stall = found[0]
    text, told = " ".join(why_text(look).split()), stall_text(look.now, stall)
    assert told.says in text
    assert told.remedy in text
    return look, stall


def config_of(broker: BrokerConfig, keys: Keys, tmp_path: Path, rows: int, **sections: Any) -> Config:
    """A run over so many rows."""
    path = tmp_path / "rows.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"q{i}"}], "id": i, "truth": "seven"} for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    producer = {"max_in_flight": 64, "samples_per_version": 2, "poll_s": 0.01, "max_staleness": 100}
    sections["producer"] = {**producer, **sections.get("producer", {})}
    sections = {"rollout_matching": {"task": "exact_answer"}, **sections}
    return run_config(broker, keys, tmp_path / "runs", data=DataConfig(path=str(path)), **sections)


@contextlib.asynccontextmanager
async def consuming(config: Config, task: Task = TASK, name: str = "consumer-0") -> AsyncIterator[None]:
    """A consumer, for the length of the block."""
    async with role_of(config, "consumer", name) as role:
        owner = Ownership(role.client, role.keys, "consumer:0")
        await owner.acquire(10, role.status.waiting)
        role.spawn(owner.keep())
        running = asyncio.create_task(Consumer(role, 0, owner, task, CONTEXT).run())
        try:
            yield
        finally:
            role.stop.set()
            await running
            await Scripts(role.client).ask(RoleKey(owner=owner.key), Disown(nonce=owner.nonce))


async def put_result(client: Any, keys: Keys, name: str, at_s: float) -> None:
    """A result as a worker commits it, at that time."""
    ids = CONTEXT.codec.encode("seven")
    arrays: dict[str, Any] = {
        "token_ids": TokenArray(ids),
        "logprobs": FloatArray([-0.5] * len(ids)),
        "versions": Runs.of([0] * len(ids)),
        "truth": "seven",
        "task": "exact_answer",
    }
    group = f"{keys.run}:{name}"
    fields = {"r": encode(sequence_result(group, **arrays)), "g": group, "i": 0, "n": 1}
    await client.xadd(keys.results + "0", fields, id=f"{int(at_s * 1000)}-*")
    await client.hincrby(keys.counts, "enqueued", 1)


class HeldMatch:
    """A match function that takes as long as the test wants it to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.go_on.wait(HANG_S)
        return exact_answer.match(*args, **kwargs)
