"""The consumer against a real broker: whole groups, dropped ones, and the same batches after a kill."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import HistoryReader
from sluice.consumers.history.records import SequenceFilter
from sluice.consumers.loop import Consumer
from sluice.consumers.rewards import Rewards
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.registry import load_task
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.pipeline.broker.scripts import Scripts
from sluice.pipeline.broker.scripts.streams import Disown, RoleKey
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, PolicyConfig, RewardTerm, RolloutMatchingConfig
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.user_modules import load_object
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import DeadLetter, TrainingBatch, decode, encode
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.deadlines import HANG_S
from tests.factories import sequence_result
from tests.roles import eventually, role_of, run_config
from tests.tiny_tokenizer import tiny_codec

TASK = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)
CONTEXT = TaskContext(tiny_codec("bytes"), RolloutMatchingConfig(task="exact_answer"))


def config_of(broker: BrokerConfig, keys: Keys, run_dir: Path, *, size: int = 4, policy: str = "drop") -> Config:
    producer = {"samples_per_version": size, "max_in_flight": 64}
    return run_config(broker, keys, run_dir, producer=producer, consumer={"on_incomplete_group": policy})


async def put(client: Any, keys: Keys, group: str, index: int = 0, size: int = 1, **changes: Any) -> None:
    ids = CONTEXT.codec.encode("seven")
    arrays: dict[str, Any] = {
        "token_ids": TokenArray(ids),
        "logprobs": FloatArray([-0.5] * len(ids)),
        "versions": Runs.of([0] * len(ids)),
        "truth": "seven",
        "task": "exact_answer",
    }
    result = sequence_result(group, index, size, **{**arrays, **changes})
    await client.xadd(keys.results + "0", {"r": encode(result), "g": group, "i": index, "n": size})
    await client.hincrby(keys.counts, "enqueued", 1)


async def put_dead(client: Any, keys: Keys, group: str, index: int) -> None:
    letter = DeadLetter(seq_id=f"{group}:{index}", reason="expired")
    await client.xadd(keys.results + "0", {"d": encode(letter), "g": group, "i": index, "n": 2})
    await client.hincrby(keys.counts, "enqueued", 1)
    await client.hincrby(keys.counts, "dead", 1)


async def consume(
    config: Config,
    until: Callable[[], Awaitable[bool]],
    cause: str = "the consumer's effect",
    task: Task = TASK,
    context: TaskContext = CONTEXT,
    rewards: Rewards | None = None,
) -> None:
    """Run a consumer until its effect is there, then stop it."""
    async with role_of(config, "consumer", "c") as role:
        owner = Ownership(role.client, role.keys, "consumer:0")
        await owner.acquire(10, role.status.waiting)
        running = asyncio.create_task(Consumer(role, 0, owner, task, context, rewards).run())
        await eventually(until, cause)
        role.stop.set()
        await running
        await Scripts(role.client).ask(RoleKey(owner=owner.key), Disown(nonce=owner.nonce))


def ended(client: Any, keys: Keys, count: int) -> Callable[[], Awaitable[bool]]:
    """Handed on, dead or dropped."""

    async def holds() -> bool:
        now = await snapshot(client, keys)
        return now.accepted + now.dead + now.dropped >= count

    return holds


async def batches(client: Any, keys: Keys) -> list[TrainingBatch]:
    return [decode(TrainingBatch, fields[b"b"]) for _, fields in await client.xrange(keys.batches)]


async def test_groups_become_batches_of_the_configured_size(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    for number in range(4):
        for index in (1, 0):
            await put(client, keys, f"g{number}", index, 2)
    await consume(config_of(broker_config, keys, run_dir), ended(client, keys, 8))
    found = await batches(client, keys)
    assert [len(batch.samples) for batch in found] == [4, 4]
    names = [sample.seq_id for batch in found for sample in batch.samples]
    assert names == [f"g{number}:{index}" for number in range(4) for index in range(2)]
    assert sorted(index for row in found[0].rows for index in row) == [0, 1, 2, 3]
    assert found[0].metrics
    assert await client.xlen(keys.results + "0") == 0


@pytest.mark.parametrize(("policy", "kept", "dropped"), [("drop", 0, 1), ("train_partial", 1, 0)])
async def test_an_incomplete_group_is_dropped_or_trained_in_part(
    policy: str, kept: int, dropped: int, broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    await put(client, keys, "g", 0, 2)
    await put_dead(client, keys, "g", 1)
    await consume(config_of(broker_config, keys, run_dir, size=1, policy=policy), ended(client, keys, 2))
    now = await snapshot(client, keys)
    assert (now.accepted, now.dead, now.dropped) == (kept, 1, dropped)
    assert now.reasons == ({"dropped:incomplete_group": 1} if dropped else {})


@pytest.mark.parametrize("ending", ["deadline", "cancelled", "error"])
async def test_an_ending_that_is_not_trained_is_a_drop_with_that_reason(
    ending: str, broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    await put(client, keys, "g", finish_reason=ending)
    await consume(config_of(broker_config, keys, run_dir), ended(client, keys, 1))
    assert (await snapshot(client, keys)).reasons == {f"dropped:{ending}": 1}


async def test_a_truth_that_makes_no_sense_is_dropped_and_its_neighbour_trained(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    await put(client, keys, "bad", truth=[1, 2])
    await put(client, keys, "good")
    await consume(config_of(broker_config, keys, run_dir, size=1), ended(client, keys, 2))
    now = await snapshot(client, keys)
    assert (now.accepted, now.reasons) == (1, {"dropped:invalid_truth": 1})
    [(_, fields)] = await client.xrange(keys.dropped)
    assert decode(DeadLetter, fields[b"d"]).seq_id == "bad:0"


REWARDS = """
import threading
hangs, gate = threading.Event(), threading.Event()

def right(text, truth, row):
    if text == "wait":
        hangs.set()
        gate.wait()
    return {"right": text == row["metadata"]["wanted"]}

async def polite(text, truth, row):
    return len(row["messages"]) / {"seven": 2, "none": 0}.get(text, 1)
"""


async def test_reward_functions_score_what_comes_and_a_hung_one_costs_its_own_sequence(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    run_dir.mkdir()
    (run_dir / "own.py").write_text(REWARDS)
    options = RolloutMatchingConfig(
        task="reward",
        reward=(
            RewardTerm(name="right", fn=f"{run_dir}/own.py:right"),
            RewardTerm(name="polite", fn=f"{run_dir}/own.py:polite", weight=0.5),
        ),
        reward_timeout_s=0.5,
    )
    context = TaskContext(CONTEXT.codec, options, policy=PolicyConfig(enabled=True))

    async def put_text(text: str) -> None:
        ids = CONTEXT.codec.encode(text)
        about: dict[str, Any] = {"metadata": {"wanted": "seven"}, "messages": [{"role": "user", "content": "?"}]}
        arrays = {"logprobs": FloatArray([0.0] * len(ids)), "versions": Runs.of([0] * len(ids))}
        await put(client, keys, text, token_ids=TokenArray(ids), truth=None, task="reward", **arrays, **about)

    rewards, config = Rewards(options, context.codec), config_of(broker_config, keys, run_dir, size=1)
    hangs, gate = (load_object(f"{run_dir}/own.py:{name}", "key") for name in ("hangs", "gate"))

    await put_text("wait")
    run = consume(config, ended(client, keys, 3), task=load_task(options), context=context, rewards=rewards)
    running = asyncio.create_task(run)
    try:
        assert await asyncio.to_thread(hangs.wait, HANG_S)
        for function in rewards.functions:
            function._timeout_s = HANG_S  # only the one that hangs is cut off soon
        await put_text("none")
        await put_text("seven")
        await running
    finally:
        gate.set()
    now = await snapshot(client, keys)
    assert (now.accepted, now.reasons) == (1, {"dropped:reward_timeout": 1, "dropped:reward_failed": 1})
    [batch] = await batches(client, keys)
    assert (batch.samples[0].seq_id, batch.samples[0].reward) == ("seven:0", 1.25)
    assert (batch.metrics["reward/right"], batch.metrics["reward/polite"]) == (1.0, 0.5)
    letters = [decode(DeadLetter, fields[b"d"]) for _, fields in await client.xrange(keys.dropped)]
    [failed] = [letter for letter in letters if letter.reason == "reward_failed"]
    assert "ZeroDivisionError" in failed.detail
    reader = HistoryReader(history_directory(config))
    [row] = [row for row in reader.sequences(SequenceFilter()).rows if row.state == "handed_on"]
    assert (row.reward, row.reward_parts) == (1.25, {"right": 1.0, "right/right": 1.0, "polite": 0.5})
    reader.close()


PLACE = {"g": b"g", "i": 0, "n": 1}


@pytest.mark.parametrize("fields", [{"r": b"junk", **PLACE}, {"d": b"junk", **PLACE}])
async def test_a_malformed_result_is_a_drop(
    fields: dict[str, Any], broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    await client.hset(f"{keys.job_state}g", "n", 1)
    await client.xadd(keys.results + "0", fields)
    await put(client, keys, "good")
    await consume(config_of(broker_config, keys, run_dir, size=1), ended(client, keys, 2))
    assert (await snapshot(client, keys)).reasons == {"dropped:malformed_result": 1}
    assert await client.xlen(keys.results + "0") == 0


JUNK: list[dict[str, Any]] = [{"x": b"1"}, {"r": b"\xc1"}, {"r": b"junk", **PLACE}, {"g": b"\xff", "i": 0, "n": 1}]


@pytest.mark.parametrize("fields", JUNK)
async def test_what_no_worker_wrote_is_discarded_and_counts_for_nothing(
    fields: dict[str, Any], broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    await client.xadd(keys.results + "0", fields)
    await put(client, keys, "good")
    await consume(config_of(broker_config, keys, run_dir, size=1), ended(client, keys, 1))
    now = await snapshot(client, keys)
    assert (now.accepted, now.dropped, now.reasons) == (1, 0, {})
    assert await client.xlen(keys.results + "0") == 0


async def test_an_unreadable_member_does_not_hold_its_group_open(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    await client.hset(f"{keys.job_state}g", "n", 2)
    await put(client, keys, "g", 0, 2)
    await client.xadd(keys.results + "0", {"r": b"junk", "g": b"g", "i": 1, "n": 2})
    await consume(config_of(broker_config, keys, run_dir), ended(client, keys, 2))
    assert (await snapshot(client, keys)).reasons == {"dropped:malformed_result": 1, "dropped:incomplete_group": 1}


async def test_what_is_left_goes_out_at_the_end_of_the_source(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    for number in range(3):
        await put(client, keys, f"g{number}")
    await client.hset(keys.source, "exhausted", 1)
    await consume(config_of(broker_config, keys, run_dir, size=64), ended(client, keys, 3))
    assert [len(batch.samples) for batch in await batches(client, keys)] == [3]


async def test_a_complete_run_ends_the_consumer(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    await client.hset(keys.source, "exhausted", 1)
    async with role_of(config_of(broker_config, keys, run_dir), "consumer", "c") as role:
        owner = Ownership(role.client, role.keys, "consumer:0")
        await owner.acquire(10, role.status.waiting)
        await asyncio.wait_for(Consumer(role, 0, owner, TASK, CONTEXT).run(), HANG_S)


async def test_the_successor_of_a_killed_consumer_makes_the_same_batches(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path
) -> None:
    """The first reader took all and handed on one batch; what it had in memory is read again."""
    config = config_of(broker_config, keys, run_dir)
    for number in range(6):
        await put(client, keys, f"g{number}")
    await consume(config, ended(client, keys, 4))
    assert await client.xlen(keys.results + "0") == 2
    for number in range(6, 8):
        await put(client, keys, f"g{number}")
    await consume(config, ended(client, keys, 8))
    names = [[sample.seq_id for sample in batch.samples] for batch in await batches(client, keys)]
    assert names == [[f"g{number}:0" for number in range(4)], [f"g{number}:0" for number in range(4, 8)]]
