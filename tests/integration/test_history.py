"""The history that a real consumer and a real trainer leave behind."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice.consumers.history.files import history_directory
from sluice.consumers.history.reader import Files, HistoryReader
from sluice.consumers.history.records import SequenceFilter, SequenceRow
from sluice.consumers.loop import Consumer
from sluice.pipeline.broker.streams import Ownership
from sluice.pipeline.config.types import BrokerConfig, Config, HistoryConfig
from sluice.pipeline.queue import Credit, Finished, JobQueue
from sluice.pipeline.status.snapshot import snapshot
from sluice.pipeline.wire.keys import Keys
from sluice.pipeline.wire.messages import SequenceResult
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.cut_off import cut_off_at
from tests.factories import decode_job, sequence_result
from tests.integration import test_consumer_loop as loop
from tests.integration import test_trainer as training
from tests.roles import role_of, run_config
from tests.tiny_models import save_tiny_model

PLENTY = Credit(10_000, 10_000, 1)


def config_of(broker: BrokerConfig, keys: Keys, run_dir: Path, **history: Any) -> Config:
    producer = {"samples_per_version": 4, "max_in_flight": 64}
    consumer = {"on_incomplete_group": "train_partial"}
    sections = {"producer": producer, "consumer": consumer, "history": HistoryConfig(**history)}
    return run_config(broker, keys, run_dir, **sections)


def decoded(job_id: str, index: int, size: int, **changes: Any) -> SequenceResult:
    ids = loop.CONTEXT.codec.encode("seven")
    arrays = {"logprobs": FloatArray([-0.5] * len(ids)), "versions": Runs.of([2] * (len(ids) - 1) + [3])}
    fields: dict[str, Any] = {"truth": "seven", "task": "exact_answer", "text": "seven", "worker": "one", **arrays}
    return sequence_result(job_id, index, size, **{"token_ids": TokenArray(ids), **fields, **changes})


def rows_of(config: Config) -> list[SequenceRow]:
    reader = HistoryReader(history_directory(config))
    try:
        return reader.sequences(SequenceFilter(), 1000).rows
    finally:
        reader.close()


async def test_a_consumer_records_what_it_hands_on_what_it_drops_and_what_is_dead(
    broker_config: BrokerConfig, client: Redis, keys: Keys, run_dir: Path
) -> None:
    config, queue = config_of(broker_config, keys, run_dir), JobQueue(client, keys, worker="one")
    await queue.enqueue([decode_job(f"{keys.run}:a", n=3)], PLENTY)
    await queue.release((await queue.claim(1, 30, 3)).claims)
    [claim] = (await queue.claim(1, 30, 3)).claims
    good = decoded(claim.job_id, 0, 3, attempt=2, finish_reason="repeat_terminated", triggers={"repeat_terminate": 1})
    bad = decoded(claim.job_id, 2, 3, attempt=2, finish_reason="error")
    assert await queue.commit([Finished(claim, good), Finished(claim, bad)]) == ["ok", "ok"]
    assert await queue.fail(claim, "max_tries", "tried too often") == 1
    for number in range(3):
        await loop.put(client, keys, f"g{number}")
    await loop.consume(config, loop.ended(client, keys, 6))
    reader = HistoryReader(history_directory(config))
    found = {row.seq_id.removeprefix(f"{keys.run}:"): row for row in rows_of(config)}
    assert {name: (row.state, row.reason) for name, row in found.items()} == {
        "a:0": ("handed_on", ""),
        "a:1": ("dead", "max_tries"),
        "a:2": ("dropped", "error"),
        **{f"g{number}:0": ("handed_on", "") for number in range(3)},
    }
    row = found["a:0"]
    assert (row.task, row.worker, row.attempt, row.text, row.group_size) == ("exact_answer", "one", 2, "seven", 3)
    assert (row.version_min, row.version_max, row.triggered, row.prompt_tokens) == (2, 3, True, 2)
    assert row.new_tokens == len(good.token_ids)
    assert row.reward == 1.0
    assert row.metrics["rollout/samples"] == 1.0
    detail, dead = reader.sequence(row.seq_id), reader.sequence(found["a:1"].seq_id)
    assert detail is not None
    assert detail.result == good
    assert detail.sample is not None
    assert dead is not None
    assert dead.letter is not None
    assert (dead.letter.detail, dead.row.worker, dead.row.attempt) == ("tried too often", "one", 2)
    job = reader.job(claim.job_id)
    assert job is not None
    assert (job.states, job.attempts) == ({"handed_on": 1, "dropped": 1, "dead": 1}, 2)
    kinds = ["enqueued", "claimed", "handed_back", "claimed", "ended"]
    assert [event.kind for event in job.events] == kinds
    assert dead.row.enqueued_at == job.events[0].at


async def consume_to_the_end(config: Config) -> None:
    async with role_of(config, "consumer", "first") as role:
        owner = Ownership(role.client, role.keys, "consumer:0")
        await owner.acquire(10, role.status.waiting)
        await Consumer(role, 0, owner, loop.TASK, loop.CONTEXT).run()


async def test_a_consumer_killed_between_history_and_hand_off_leaves_no_double(
    broker_config: BrokerConfig, client: Any, keys: Keys, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(broker_config, keys, run_dir)
    for number in range(8):
        await loop.put(client, keys, f"g{number}")
    await cut_off_at("sluice.consumers.loop.hand_off", 1, monkeypatch, consume_to_the_end(config))
    before = rows_of(config)
    assert len(before) == 4
    await client.delete(f"{keys.owner}consumer:0")  # the dead one's lease runs out
    await loop.consume(config, loop.ended(client, keys, 8))
    rows = rows_of(config)
    assert [row.seq_id for row in rows] == [f"g{number}:0" for number in reversed(range(8))]
    assert rows[4:] == before
    assert (await snapshot(client, keys)).accepted == 8


@pytest.mark.parametrize("broken", ["a file in its place", "a file of another schema", "junk"])
async def test_a_history_that_cannot_be_written_stops_nobody(
    broken: str,
    broker_config: BrokerConfig,
    client: Redis,
    keys: Keys,
    run_dir: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = config_of(broker_config, keys, run_dir)
    directory = history_directory(config)
    directory.mkdir(parents=True)
    if broken == "a file in its place":
        shutil.rmtree(directory)
        directory.write_text("not a directory")
    else:
        (directory / "consumer-0.sqlite").write_bytes(b"junk" * 2000)
    if broken == "a file of another schema":
        (directory / "consumer-0.sqlite").unlink()
        with sqlite3.connect(directory / "consumer-0.sqlite") as db:
            db.execute("pragma user_version=99")
    for number in range(12):
        await loop.put(client, keys, f"g{number}")
    await loop.consume(config, loop.ended(client, keys, 12))
    assert (await snapshot(client, keys)).accepted == 12
    assert capfd.readouterr().err.count("history is no longer written") == 1


async def test_switched_off_nothing_is_written(
    broker_config: BrokerConfig, client: Redis, keys: Keys, run_dir: Path
) -> None:
    config = config_of(broker_config, keys, run_dir, enabled=False)
    for number in range(4):
        await loop.put(client, keys, f"g{number}")
    await loop.consume(config, loop.ended(client, keys, 4))
    assert not history_directory(config).exists()


async def test_the_trainer_records_the_step_of_each_once_wherever_it_was_cut_off(
    broker_config: BrokerConfig,
    client: Any,
    keys: Keys,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, source = training.config_of(broker_config, keys, run_dir), save_tiny_model(tmp_path / "model")
    await training.hand_on(client, keys, 0, 3)
    await cut_off_at("sluice.consumers.training.session.ack_batches", 2, monkeypatch, training.train(config, source))
    await training.train(config, source)
    files = Files(history_directory(config))
    steps = files.ask("trainer.sqlite", "select seq_id, step, state from trained order by step, seq_id")
    assert steps == [(f"{step}-{member}:0", step + 1, "trained") for step in range(3) for member in range(2)]
    trained = files.trained(["2-0:0"])["2-0:0"]
    assert (trained.step, trained.version) == (3, 2)
    files.close()
